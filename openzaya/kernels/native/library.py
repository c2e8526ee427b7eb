"""Compiles the C kernels of this folder once per machine, and calls them.

The system's C compiler builds them on first use, for exactly this CPU, into the user's cache; that
takes some seconds, once. Without a compiler, or with `OPENZAYA_NATIVE=0`, everything runs on torch
alone, slower; `why_missing` says why. Importing builds nothing and prints nothing.

What each function computes is written in C beside this file; its place in autograd is in the module
of the operation (`kernels/attention.py` and its neighbours).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
FLAGS: tuple[str, ...] = (
    *("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS += ("-mprefer-vector-width=512",)
SWITCH = "OPENZAYA_NATIVE"

TILE = 32
"""Inner sizes of the kernels' matrix products must be multiples of this."""

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class TilesWithheld(Exception):
    """The CPU has tile registers, but the system does not grant them, as in some containers."""


class Library:
    """The compiled kernels.

    Attributes:
        tiles: whether matrix products run on the CPU's tile unit (AMX).

    Raises:
        OSError: if the file cannot be loaded.
        TilesWithheld: if it needs tile registers and may not use them.
    """

    def __init__(self, path: Path) -> None:
        self._functions = ctypes.CDLL(str(path))
        self._process = os.getpid()
        if self._functions.openzaya_init():
            raise TilesWithheld
        self.tiles = bool(self._functions.openzaya_tiles())

    def call(self, name: str, *arguments: Tensor | int | float | None) -> None:
        """Run a kernel with torch's number of threads.

        Args:
            name: of the C function; it takes pointers, ints and floats in this order, then the
                number of threads, and returns 0 unless memory is short.
            arguments: tensors must be contiguous, on the CPU, and outlive the call.

        Raises:
            MemoryError: if the kernel found no scratch memory.
        """
        values: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                assert argument.is_contiguous()
                values.append(_POINTER(argument.data_ptr()))
            elif argument is None:
                values.append(_POINTER(None))
            elif isinstance(argument, float):
                values.append(_FLOAT(argument))
            else:
                values.append(_INT(argument))
        function: Callable[..., int] = getattr(self._functions, name)
        # A forked child has the threads of OpenMP in its books, but not in fact: it would wait for
        # them for ever.
        threads = torch.get_num_threads() if os.getpid() == self._process else 1
        if function(*values, _INT(threads)):
            raise MemoryError(f"no memory for the scratch space of {name}")


_written_out: ContextVar[bool] = ContextVar("written_out", default=False)


@contextmanager
def written_out() -> Iterator[None]:
    """Compute step by step with torch, so that what lies between the steps can be looked at."""
    token = _written_out.set(True)
    try:
        yield
    finally:
        _written_out.reset(token)


def kernels_for(x: Tensor, dtype: torch.dtype | None = None) -> Library | None:
    """The kernels, if there are any for an operation that computes in bf16 on this tensor's device.

    Args:
        dtype: that the operation computes in, if it is not the tensor's.
    """
    if x.device.type != "cpu" or (dtype or x.dtype) != torch.bfloat16 or _written_out.get():
        return None
    return library()


def library() -> Library | None:
    """The kernels for this machine, compiled if they have not been; None where they cannot be."""
    return _found()[0]


def why_missing() -> str | None:
    """Why there are no kernels, and what to do; None if there are, or nobody wants them."""
    return _found()[1]


@functools.cache
def _found() -> tuple[Library | None, str | None]:
    if os.environ.get(SWITCH, "1") == "0":
        return None, None
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None, "there is no C compiler (install gcc or clang)"
    try:
        try:
            return _load(compiler, FLAGS), None
        except TilesWithheld:
            return _load(compiler, (*FLAGS, "-DNO_TILES")), None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or "").strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[0] if lines else error)
        return None, f"{compiler} failed ({reason})"
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"they could not be built or loaded ({error})"


def _load(compiler: str, flags: tuple[str, ...]) -> Library:
    """The library from the cache, compiled into it if it is not there or damaged."""
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, errors="replace", check=True
    )
    texts = [path.read_text() for path in sorted(HERE.glob("*.[ch]"))]
    key = hashlib.sha256("\0".join([*texts, *flags, version.stdout, _cpu()]).encode()).hexdigest()
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "openzaya"
        target = cache / f"kernels-{key[:16]}.so"
        if not _is_whole(target):
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                # Several processes may build at once: the last one wins.
                _build(compiler, flags, Path(folder)).replace(target)
        return Library(target)
    # No cache that can be written, or run from: for this process alone. Not in a fixed place, where
    # another user might lay something else.
    with tempfile.TemporaryDirectory() as folder:
        return Library(_build(compiler, flags, Path(folder)))


def _build(compiler: str, flags: tuple[str, ...], folder: Path) -> Path:
    """Compile into a folder; the file ends with the digest of what comes before."""
    out = folder / "kernels.so"
    command = [compiler, *flags, *map(str, sorted(HERE.glob("*.c"))), "-o", str(out), "-lm"]
    # Clang on macOS comes without OpenMP: one thread is better than none.
    for openmp in (["-fopenmp"], []):
        done = subprocess.run([*command, *openmp], capture_output=True, text=True, errors="replace")
        if done.returncode == 0:
            break
    done.check_returncode()
    content = out.read_bytes()
    out.write_bytes(content + hashlib.sha256(content).digest())
    return out


def _is_whole(path: Path) -> bool:
    """Whether a library is there as it was built: to load half of one ends the process."""
    if not path.exists():
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    kept = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))
