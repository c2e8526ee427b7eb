"""How the kernels are built, found, and done without; and that threads do not matter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from openzaya.config.load import load_recipe
from openzaya.kernels.cross_entropy import linear_cross_entropy
from openzaya.kernels.experts import mix_experts
from openzaya.kernels.native import library as module
from openzaya.kernels.native.library import (
    Library,
    kernels_for,
    library,
    why_missing,
    written_out,
)
from tests.kernels.native import needs_kernels, normal

REPORT = """
import torch
from openzaya.kernels.native import library
from openzaya.kernels.norm import rms_norm
x = torch.ones(2, 32, requires_grad=True)
out = rms_norm(x, torch.ones(32), 1e-5, torch.bfloat16)
assert torch.equal(out, torch.ones(2, 32).bfloat16())
print(type(out.grad_fn).__name__, library.why_missing(), sep="|")
"""
TINY = "int openzaya_init(void) { return 0; } int openzaya_tiles(void) { return 0; }"
"""All that loading asks of the kernels, as these take seconds to compile."""


def _run(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "", "importing and falling back are silent"
    return done.stdout.strip()


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Tiny kernels and an empty cache, whose folder is returned."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.c").write_text(TINY)
    monkeypatch.setattr(module, "HERE", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "openzaya"


def _find() -> tuple[Library | None, str | None]:
    """What a fresh process would find."""
    return module._found.__wrapped__()


def _compiler(folder: Path, monkeypatch, script: str) -> None:
    """Make this the only compiler."""
    folder.mkdir()
    (folder / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_without_a_compiler(tmp_path):
    node, reason = _run(REPORT, PATH=str(tmp_path)).split("|")
    assert node != "_MergeNormBackward"
    assert "install gcc or clang" in reason


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("[ $1 = --version ] || { echo 'x.c:1: error: no omp.h' >&2; exit 1; }", "error: no omp.h"),
        ("[ $1 = --version ] || exit 3", "exit status 3"),
        ("exit 1", "exit status 1"),
        ("exit 0", "could not be built"),
        ("kill -9 $$", "SIGKILL"),
        # -o is followed by the file to write.
        ('while [ $# -gt 1 ]; do [ "$1" = -o ] && echo junk >"$2"; shift; done', "or loaded"),
        ("/nowhere/cc1", "/nowhere/cc1"),
    ],
    ids=["error", "silent", "no-version", "no-output", "killed", "junk", "incomplete"],
)
def test_a_compiler_that_fails(tmp_path, monkeypatch, tiny, script, says):
    _compiler(tmp_path / "bin", monkeypatch, script)
    lib, reason = _find()
    assert lib is None
    assert reason is not None
    assert says in reason
    assert "\n" not in reason


def test_switched_off(monkeypatch):
    """Nobody is told of what they chose."""
    monkeypatch.setenv("OPENZAYA_NATIVE", "0")
    assert _find() == (None, None)


@needs_kernels
def test_importing_builds_nothing(tmp_path):
    code = "import openzaya.model.model, openzaya.train.trainer"
    assert _run(code, XDG_CACHE_HOME=str(tmp_path)) == ""
    assert not list(tmp_path.iterdir())


@needs_kernels
@pytest.mark.parametrize("kind", ["file", "homeless"])
def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch, tiny, kind):
    """Built for the process alone, and nothing is left behind. (A file stands in the folder's
    place: what permissions forbid, root may.)"""
    if kind == "file":
        tiny.parent.write_text("")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setattr(Path, "home", _homeless)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    lib, reason = _find()
    assert isinstance(lib, Library)
    assert reason is None
    assert not list((tmp_path / "tmp").iterdir())


def _homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


@needs_kernels
def test_a_damaged_cache_is_rebuilt(tiny):
    """Half a library would end the process when it is loaded, not raise an error."""
    assert _find()[0] is not None
    [file] = tiny.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:31], whole[: len(whole) // 2], whole[:999] + b"?" + whole[1000:]):
        file.unlink()  # the old one is loaded here
        file.write_bytes(damaged)
        assert isinstance(_find()[0], Library)
        assert module._is_whole(file)
    # Of a whole one nothing is built again.
    stamp = file.stat().st_mtime_ns
    assert _find()[0] is not None
    assert file.stat().st_mtime_ns == stamp


@needs_kernels
def test_two_processes_build_at_once(tiny):
    code = f"import pathlib; library.HERE = pathlib.Path({str(module.HERE)!r})\n"
    code = f"from openzaya.kernels.native import library; {code}print(library.why_missing())"
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for run in runs:
        assert run.communicate(timeout=60)[0].strip() == "None"
    assert len(list(tiny.iterdir())) == 1


@needs_kernels
def test_tiles_that_the_system_withholds(tiny):
    """Then the kernels go without them, instead of not being there at all."""
    (module.HERE / "tiny.c").write_text(
        TINY.replace("{ return 0; } int", "{\n#ifdef NO_TILES\nreturn 0;\n#endif\nreturn 1; }\nint")
    )
    lib, reason = _find()
    assert isinstance(lib, Library)
    assert reason is None
    assert len(list(tiny.iterdir())) == 2, "each process would build anew"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_with_a_compiler_there_are_kernels():
    """Else all the other tests of kernels would be skipped in silence."""
    assert why_missing() is None
    assert library() is not None


@needs_kernels
def test_where_kernels_are_for():
    assert kernels_for(normal(0, 1)) is library()
    assert kernels_for(normal(0, 1).float()) is None
    assert kernels_for(normal(0, 1).half()) is None
    assert kernels_for(normal(0, 1).to("meta")) is None
    assert kernels_for(normal(0, 1).float(), torch.bfloat16) is library()
    with written_out():
        assert kernels_for(normal(0, 1)) is None


def test_training_says_why_it_will_be_slow(monkeypatch, capsys):
    from rich.console import Console

    from openzaya.train import setup

    console = Console(width=200)
    recipe = load_recipe("tiny", ['run.compute_dtype="bfloat16"'])
    exact = load_recipe("tiny", ['run.compute_dtype="float32"'])
    cpu = torch.device("cpu")
    monkeypatch.setattr(setup, "why_missing", lambda: "there is no C compiler (install gcc)")
    setup._warn_of_missing_kernels(exact, cpu, console)
    setup._warn_of_missing_kernels(recipe, torch.device("meta"), console)
    assert capsys.readouterr().out == ""
    setup._warn_of_missing_kernels(recipe, cpu, console)
    assert capsys.readouterr().out.count("install gcc") == 1
    monkeypatch.setattr(setup, "why_missing", lambda: None)
    setup._warn_of_missing_kernels(recipe, cpu, console)
    assert capsys.readouterr().out == ""


def _work() -> list[torch.Tensor]:
    """Losses and gradients of the two kernels that divide work in the most ways."""
    x = normal(1, 300, 64).requires_grad_()
    gate_up = normal(2, 5, 128, 64, dtype=torch.float32).requires_grad_()
    down = normal(3, 5, 64, 64, dtype=torch.float32).requires_grad_()
    head = normal(4, 600, 64, dtype=torch.float32).requires_grad_()
    weight = torch.rand(300, generator=torch.Generator().manual_seed(5)).requires_grad_()
    index, targets = torch.arange(300) % 6, torch.arange(300)
    out = mix_experts(x, index, weight, gate_up / 8, down / 8, False)
    loss = linear_cross_entropy(out, head, targets)
    loss.backward()
    return [loss.detach(), *(t.grad for t in (x, gate_up, down, head, weight))]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_kernels
@pytest.mark.parametrize("count", [1, 2, 3])
def test_two_runs_are_bit_identical(threads, count):
    threads(count)
    for a, b in zip(_work(), _work(), strict=True):
        assert torch.equal(a, b)


@needs_kernels
def test_the_number_of_threads_only_rounds(threads):
    results = []
    for count in (1, 2, 7):
        threads(count)
        results.append(_work())
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert float((a.float() - b.float()).norm() / a.float().norm()) < 2e-3


@needs_kernels
@pytest.mark.parametrize(("forward", "backward"), [(1, 3), (3, 1)])
def test_threads_change_between_forward_and_backward(threads, forward, backward):
    results = []
    for count in (forward, backward):
        threads(forward)
        x = normal(1, 90, 64).requires_grad_()
        gate_up, down = (
            normal(i, 3, n, 64, dtype=torch.float32) / 8 for i, n in ((2, 128), (3, 64))
        )
        out = mix_experts(x, torch.arange(90) % 4, torch.ones(90), gate_up, down, True)
        threads(count)
        out.backward(normal(4, 90, 64))
        results.append(x.grad)
    assert torch.equal(*results)


@needs_kernels
def test_from_another_thread():
    results: list[list[torch.Tensor]] = []
    workers = [threading.Thread(target=lambda: results.append(_work())) for _ in range(3)]
    for worker in workers:
        worker.start()
    expected = _work()
    for worker in workers:
        worker.join()
    assert len(results) == 3
    for result in results:
        for a, b in zip(result, expected, strict=True):
            assert float((a.float() - b.float()).norm() / b.float().norm()) < 2e-3


@needs_kernels
def test_in_a_forked_child(threads):
    """As in a worker of a data loader: OpenMP's threads are not there, but it waits for them."""
    threads(2)
    expected = float(_work()[0])
    reader, writer = os.pipe()
    child = os.fork()
    if not child:  # only kernels: torch's own operations may wait for ever here
        x, gain = torch.ones(64, 32), torch.ones(32)
        out, inverse = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(64)
        lib = library()
        lib.call(
            "merge_norm_forward", 64, 32, x, None, None, None, None, gain, 0.0, None, out, inverse
        )
        os.write(writer, str(float(out[-1, -1])).encode())
        os._exit(0)
    os.close(writer)
    done = threading.Thread(target=os.waitpid, args=(child, 0), daemon=True)
    done.start()
    done.join(20)
    if done.is_alive():
        os.kill(child, 9)
    assert os.read(reader, 99) == b"1.0"
    os.close(reader)
    assert float(_work()[0]) == expected, "and the parent goes on"
