"""`openzaya data`: built in a process that may be killed, inspected, verified, trained on."""

import json
import resource
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from openzaya.cli import main as cli
from openzaya.config.load import load_recipe
from openzaya.data.sources import CORPUS
from openzaya.data.tokenizer import Tokenizer
from openzaya.train.metrics import read_metrics
from openzaya.train.trainer import train


@pytest.fixture
def corpus(tmp_path):
    """Ten files of a play, and a tokenizer."""
    text = (CORPUS / "tinyshakespeare.txt").read_text(encoding="utf-8")
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(10):
        part = text[number * 100_000 : (number + 1) * 100_000].split("\n\n")
        rows = "".join(json.dumps({"text": speech}) + "\n" for speech in part)
        (folder / f"{number}.jsonl").write_text(rows)
    Tokenizer.train([text[:50_000]], 400).save(tmp_path / "tokenizer.json")
    return folder


def arguments(corpus, out, *more):
    found = ["--kind", "jsonl", "--path", str(corpus), "--out", str(out), "--shard-tokens", "20000"]
    tokenizer = ["--tokenizer", str(corpus.parent / "tokenizer.json")]
    return ["data", "build", *found, *tokenizer, "--workers", "1", *more]


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_build_inspect_and_verify(corpus, tmp_path, capsys):
    out = tmp_path / "shards"
    assert cli.main(arguments(corpus, out, "--json")) == 0
    built = json.loads(capsys.readouterr().out)
    assert built["new_tokens"] == sum(built["tokens"].values()) > 100_000
    assert built["shards"] > 10
    assert cli.main(["data", "inspect", str(out), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert {key: built[key] for key in seen} == seen
    assert seen["sample"].startswith("First Citizen:\nBefore we proceed")
    assert cli.main(["data", "inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    assert f"{built['tokens']['train']:,} to train on" in shown
    assert max(map(len, shown.splitlines()[:-2])) <= 80
    assert cli.main(arguments(corpus, out)) == 0
    assert "whole already" in capsys.readouterr().out
    for quick in ([], ["--quick"]):
        assert cli.main(["data", "verify", str(out), *quick]) == 0
        assert "all as they were built" in capsys.readouterr().out
    damaged = out / "heldout-00003.offsets"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\1")
    for quick in ([], ["--quick"]):
        assert cli.main(["data", "verify", str(out), *quick]) == 1
        assert capsys.readouterr().out.startswith("heldout-00003.offsets is damaged")
    assert cli.main(["data", "verify", str(out), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["damaged"]) == 1
    (out / "manifest.json").write_text("{}")
    assert cli.main(["data", "verify", str(out)]) == 1
    assert "manifest.json is damaged" in capsys.readouterr().out


def test_a_build_that_is_killed_goes_on(corpus, tmp_path, capsys):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert cli.main(arguments(corpus, whole)) == 0
    command = [sys.executable, "-m", "openzaya.cli.main", *arguments(corpus, out)]
    seen = []
    for signum in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            scratch = tmp_path / ".out.building"
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and process.poll() is None:
                if len(list(scratch.glob("train-*.offsets"))) > 2 * len(seen) + 2:
                    break
                time.sleep(0.002)
            process.send_signal(signum)
            _, err = process.communicate(timeout=60)
        assert not out.exists()
        if signum == signal.SIGINT:
            assert process.returncode == 130
            assert "the same command goes on" in err
            assert "Traceback" not in err
        seen.append(signum)
    capsys.readouterr()
    assert cli.main([*arguments(corpus, out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept_tokens"] > 0
    assert content(out) == content(whole)


def test_a_full_disk_ends_with_one_message(corpus, tmp_path, capsys):
    """A real limit of the system: no file may grow beyond 25 kB, which a shard does."""
    out = tmp_path / "out"

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, 25_000))

    command = [sys.executable, "-m", "openzaya.cli.main", *arguments(corpus, out)]
    result = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert result.returncode == 2
    assert "is not finished" in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()
    assert cli.main(arguments(corpus, out)) == 0
    assert cli.main(["data", "verify", str(out)]) == 0


def test_a_recipe_trains_on_shards_as_on_the_text(corpus, tmp_path, capsys):
    shared = [
        "phases.text.steps=2",
        "phases.text.context=32",
        "phases.text.batch_sequences=4",
        "phases.text.micro_sequences=2",
        "phases.text.warmup_steps=1",
        "phases.reason.steps=1",
        "phases.reason.mixture={ plays = 1.0 }",
        "phases.reason.batch_sequences=2",
        "phases.reason.micro_sequences=2",
        "run.eval_every=1",
        "run.eval_sequences=2",
        "run.tensorboard=false",
        "run.threads=1",
    ]
    text = ["sources.plays.kind=jsonl", f"sources.plays.path={corpus}", "sources.plays.heldout=0.1"]
    tokenizer = f"tokenizer.path={tmp_path / 'tokenizer.json'}"
    out = tmp_path / "shards"
    assert cli.main(arguments(corpus, out, "--heldout", "0.1")) == 0
    runs = {
        "text": [*text, tokenizer],
        "shards": ["sources.plays.kind=shards", f"sources.plays.path={out}"],
    }
    losses = []
    for name, overrides in runs.items():
        recipe = load_recipe("tiny", [*shared, *overrides, f"name={name}"])
        train(recipe, tmp_path / "runs", Console(quiet=True))
        records = read_metrics(tmp_path / "runs" / name)
        losses.append([r.get("loss", r.get("heldout")) for r in records])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--kind", "jsonl", "--path", "/nowhere"], "no jsonl file at '/nowhere'"),
        (["--kind", "jsonl"], "needs `path`"),
        (["--path", "x"], "give --kind"),
        (["--recipe", "tiny", "--source", "sums"], "kind 'tasks' cannot be tokenised"),
        (["--recipe", "tiny", "--source", "sun"], "the recipe has plays, sums"),
        (["--kind", "stdlib"], "which tokenizer"),
        (["--kind", "stdlib", "--tokenizer", "/nowhere.json"], "cannot read the tokenizer"),
        (["--kind", "stdlib", "--tokenizer", "a", "--train-tokenizer", "9"], "exclude each other"),
        (["--kind", "stdlib", "--heldout", "1.5", "--train-tokenizer", "300"], "less than 1"),
        (["--kind", "stdlib", "--workers", "0"], "--workers is 0"),
    ],
)
def test_bad_input_is_one_message(more, message, tmp_path, capsys):
    assert cli.main(["data", "build", "--out", str(tmp_path / "out"), *more]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_names_corpus_and_tokenizer(tmp_path, capsys):
    out = tmp_path / "plays"
    command = ["data", "build", "--recipe", "tiny", "--source", "plays", "--out", str(out)]
    assert cli.main([*command, "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 512


@pytest.fixture
def chats(tmp_path):
    """Ten chats with ever longer reasoning, and a tokenizer of single bytes."""
    turns = [
        [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "reasoning_content": "hm " * 30 * i, "content": f"Because {i}."},
        ]
        for i in range(10)
    ]
    rows = "".join(json.dumps({"messages": messages}) + "\n" for messages in turns)
    (tmp_path / "chats.jsonl").write_text(rows)
    Tokenizer.train([], 263).save(tmp_path / "tokenizer.json")
    return tmp_path


def trim_arguments(chats, *more):
    where = ["--path", str(chats / "chats.jsonl"), "--tokenizer", str(chats / "tokenizer.json")]
    return ["data", "trim", *where, "--out", str(chats / "out"), "--workers", "1", *more]


def test_trim_writes_a_file_for_every_stage(chats, capsys):
    assert cli.main(trim_arguments(chats, "--context", "200", "1K")) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[:-1])) <= 80
    lines = (chats / "out/200.jsonl").read_text().splitlines()
    answers = [json.loads(line)["messages"][-1]["content"] for line in lines]
    assert answers == [f"Because {i}." for i in range(10)]
    assert len((chats / "out/1024.jsonl").read_text()) > len("".join(lines))
    assert cli.main(trim_arguments(chats, "--context", "200")) == 2
    assert "exists already" in capsys.readouterr().err


def test_what_was_trimmed_trains(chats, capsys):
    assert cli.main(trim_arguments(chats, "--context", "30", "200", "--json")) == 0
    small, large = json.loads(capsys.readouterr().out)["contexts"]
    assert small["dropped"] == 10
    assert (large["whole"], large["cut"], large["exact"]) == (2, 8, 8)
    (chats / "recipe.toml").write_text(
        f"""
        name = "trimmed"
        model.preset = "tiny"
        tokenizer.path = "{chats}/tokenizer.json"
        sources.chats = {{kind = "chat", path = "{chats}/out/200.jsonl", heldout = 0}}
        run.eval_every = 0
        [[phases]]
        name = "chat"
        steps = 2
        context = 200
        batch_sequences = 2
        micro_sequences = 2
        lr = 1e-3
        lr_final = 1e-3
        mixture.chats = 1.0
        """
    )
    recipe = load_recipe(str(chats / "recipe.toml"))
    train(recipe, chats / "runs", Console(quiet=True))
    assert len(read_metrics(chats / "runs/trimmed")) >= 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--context", "4X"], "'4X' is no number of tokens"),
        (["--context", "0"], "'0' is no number of tokens"),
        (["--context", "1K", "1024"], "names a length twice"),
        (["--context", "1K", "--workers", "0"], "--workers is 0"),
        (["--context", "1K", "--path", "/nowhere"], "no chat file at '/nowhere'"),
        (["--context", "1K", "--tokenizer", "/nowhere"], "cannot read the tokenizer"),
    ],
)
def test_trim_refuses_bad_input_at_once(more, message, chats, capsys):
    there = sorted(chats.iterdir())
    assert cli.main(trim_arguments(chats, *more)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert sorted(chats.iterdir()) == there


def test_a_trim_that_fails_leaves_nothing(chats, capsys):
    with (chats / "chats.jsonl").open("a") as file:
        file.write('{"messages": [{}]}\n')
    there = sorted(chats.iterdir())
    assert cli.main(trim_arguments(chats, "--context", "100")) == 2
    assert "chats.jsonl:11" in capsys.readouterr().err
    assert sorted(chats.iterdir()) == there


@pytest.mark.parametrize("verb", ["trim", "build", "inspect", "verify"])
def test_every_verb_teaches_by_example(verb, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["data", verb, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert f"openzaya data {verb} " in shown.split("examples:")[1]


def test_data_alone_lists_its_verbs(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["data"])
    assert left.value.code == 2
    assert cli.main(["data", "inspect", "/nowhere"]) == 2
    assert "no folder of token shards" in capsys.readouterr().err
