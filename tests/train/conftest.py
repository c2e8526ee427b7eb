import pytest
from rich.console import Console

from openzaya.config.load import load_recipe

SHORT = [
    "phases.text.steps=4",
    "phases.text.context=32",
    "phases.text.batch_sequences=4",
    "phases.text.micro_sequences=2",
    "phases.text.warmup_steps=1",
    "phases.reason.steps=4",
    "phases.reason.context=128",
    "phases.reason.batch_sequences=4",
    "phases.reason.micro_sequences=2",
    "run.checkpoint_every=3",
    "run.eval_every=4",
    "run.eval_sequences=2",
    "run.keep_checkpoints=9",
    "run.tensorboard=false",
    "sources.plays.kind=text",
    "run.threads=1",
]


@pytest.fixture
def recipe(tmp_path):
    """A recipe of two phases of four steps, on a few kilobytes of text."""
    words = "the quick brown fox jumps over the lazy dog and then sleeps a while"
    words = words.split(" ")
    documents = [" ".join(words[i % 7 :] * (2 + i % 3)) for i in range(60)]
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(documents))

    def make(*overrides):
        return load_recipe(
            "tiny",
            [
                *SHORT,
                f"sources.plays.path={file}",
                'sources.plays.separator="\\n\\n"',
                "sources.plays.heldout=0.2",
                *overrides,
            ],
        )

    return make


@pytest.fixture(scope="session")
def quiet():
    return Console(quiet=True)
