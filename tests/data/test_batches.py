from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openzaya.config.recipe import PhaseConfig, SourceConfig
from openzaya.data.batches import DataPlan
from openzaya.data.packing import IGNORE, Batch
from openzaya.data.tokenizer import Tokenizer
from openzaya.errors import UserError


def phase(mixture: dict[str, float], context: int = 16, rows: int = 6, **more: Any) -> PhaseConfig:
    settings = {"name": "p", "steps": 5, "micro_sequences": 1, "lr": 1.0, "lr_final": 0.0, **more}
    return PhaseConfig(context=context, batch_sequences=rows, mixture=mixture, **settings)


@pytest.fixture
def sources(letters: Path) -> dict[str, SourceConfig]:
    text = SourceConfig(kind="text", path=str(letters), separator="|", heldout=0.2)
    return {
        "cut": text,
        "whole": text.model_copy(update={"whole": True}),
        "plain": SourceConfig(kind="tasks", tasks=("add", "count")),
        "chat": SourceConfig(kind="tasks", style="chat"),
    }


@pytest.fixture
def plan(sources: dict[str, SourceConfig], tmp_path: Path, byte_tokenizer: Tokenizer) -> DataPlan:
    return make(sources, tmp_path, byte_tokenizer)


def make(
    sources: dict[str, SourceConfig], folder: Path, tokenizer: Tokenizer, seed: int = 0
) -> DataPlan:
    phases = [
        phase({"cut": 1.0}),
        phase({"whole": 1.0}, context=32),
        phase({"plain": 1.0}, context=200),
        phase({"chat": 1.0}, context=400),
        phase({"cut": 0.5, "whole": 0.2, "chat": 0.3}, context=256, rows=10),
        phase({"cut": 1.0}),
    ]
    return DataPlan(sources, phases, tokenizer, folder / "cache", seed)


def same(a: Batch, b: Batch) -> bool:
    pairs = [(a.tokens, b.tokens), (a.targets, b.targets), (a.positions, b.positions)]
    return all(torch.equal(x, y) for x, y in pairs) and a.real_tokens == b.real_tokens


def check_borders(batch: Batch) -> None:
    """Positions count up or restart; a target is the next token of the same document or none."""
    positions, targets, tokens = batch.positions, batch.targets, batch.tokens
    assert (positions[:, 0] == 0).all()
    restarts = positions[:, 1:] == 0
    assert (restarts | (positions[:, 1:] == positions[:, :-1] + 1)).all()
    assert (targets[:, :-1][restarts] == IGNORE).all()
    given = targets[:, :-1] != IGNORE
    assert (targets[:, :-1][given] == tokens[:, 1:][given]).all()


def test_order_of_calls_does_not_matter(
    plan: DataPlan, sources: dict[str, SourceConfig], tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    places = [(p, step) for p in range(6) for step in (0, 1, 4, 100)]
    forward = {place: plan.batch(*place) for place in places}
    other = make(sources, tmp_path, byte_tokenizer)
    for place in reversed(places):
        assert same(other.batch(*place), forward[place])
        check_borders(forward[place])


def test_rows_are_slices_of_the_batch(plan: DataPlan) -> None:
    whole = plan.batch(4, 3)
    parts = [plan.rows(4, 3, start, stop) for start, stop in ((0, 1), (1, 6), (6, 10))]
    for name in ("tokens", "targets", "positions"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    assert sum(part.real_tokens for part in parts) == whole.real_tokens
    with pytest.raises(IndexError, match="rows 0:11"):
        plan.rows(4, 3, 0, 11)


def test_seed_and_phase_give_other_orders(
    plan: DataPlan, sources: dict[str, SourceConfig], tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    other = make(sources, tmp_path, byte_tokenizer, seed=1)
    for index in range(5):
        assert not same(plan.batch(index, 0), other.batch(index, 0))
    assert not same(plan.batch(0, 0), plan.batch(5, 0))  # the same source in a later phase


def test_golden_digest(plan: DataPlan) -> None:
    """Recorded: another value means that every run's data order has changed."""
    batch = plan.batch(4, 7)
    digest = hashlib.sha256()
    for tensor in (batch.tokens, batch.targets, batch.positions):
        digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest()[:16] == "9cf8ed525841cd3c"


def test_an_epoch_of_windows_shows_every_token_once(plan: DataPlan) -> None:
    side = plan.stores["cut"].train
    windows = len(side.tokens) // 16
    for epoch in (0, 1):
        slots = range(epoch * windows, (epoch + 1) * windows)
        seen = torch.cat([plan.rows(0, s // 6, s % 6, s % 6 + 1).tokens.ravel() for s in slots])
        count = torch.bincount(seen, minlength=300)
        total = torch.bincount(torch.tensor(np.asarray(side.tokens, "int64")), minlength=300)
        assert (count <= total).all()
        assert total.sum() - count.sum() == len(side.tokens) % 16
    first = {tuple(plan.rows(0, s // 6, s % 6, s % 6 + 1).tokens[0].tolist()) for s in slots}
    again = range(windows)
    second = {tuple(plan.rows(0, s // 6, s % 6, s % 6 + 1).tokens[0].tolist()) for s in again}
    assert first != second  # the grid moves between epochs


def test_whole_documents_stay_whole_and_long_ones_are_counted(
    plan: DataPlan, byte_tokenizer: Tokenizer
) -> None:
    side = plan.stores["whole"].train
    fitting = [side.document(i).tolist() for i in range(len(side))]
    fitting = [ids for ids in fitting if len(ids) <= 32]
    assert plan.dropped == {(1, "whole"): len(side) - len(fitting)}
    seen: list[list[int]] = []
    rows = 0
    while len(seen) < len(fitting):
        row = plan.rows(1, rows // 6, rows % 6, rows % 6 + 1)
        text = byte_tokenizer.decode(row.tokens[0, : row.real_tokens].tolist(), skip_special=False)
        seen += [[*byte_tokenizer.encode(part), 1] for part in text.split("<eos>")[:-1]]
        rows += 1
    assert sorted(seen) == sorted(fitting)  # one epoch: each once


def test_task_rows(plan: DataPlan, byte_tokenizer: Tokenizer) -> None:
    batch = plan.batch(2, 0)
    assert 0.5 < batch.real_tokens / batch.tokens.numel() < 1
    pad = batch.tokens == byte_tokenizer.pad_id
    assert pad.sum() == batch.tokens.numel() - batch.real_tokens
    assert (batch.targets[pad] == IGNORE).all()
    assert (batch.tokens[:, -1] != 1).any()
    chat = plan.batch(3, 0)
    learned = chat.targets[chat.targets != IGNORE].tolist()
    text = byte_tokenizer.decode(learned, skip_special=False)
    assert text.startswith("<think>\n")
    assert "<|im_start|>" not in text
    assert "user" not in text
    assert text.endswith("<|im_end|>")


def test_heldout_batches_are_fixed_and_apart(
    plan: DataPlan, sources: dict[str, SourceConfig], tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    other = make(sources, tmp_path, byte_tokenizer, seed=5)
    for name, context in (("cut", 16), ("whole", 64), ("plain", 200), ("chat", 300)):
        batch = plan.heldout(name, context, 3)
        assert same(batch, other.heldout(name, context, 3))
        assert batch.tokens.shape == (3, context)
        check_borders(batch)
    held = set(np.asarray(plan.stores["cut"].heldout.tokens).tolist()) - {1}
    assert not held & set(
        np.asarray(plan.stores["cut"].train.tokens).tolist()
    )  # each document has its letter
    assert set(plan.heldout("cut", 16, 3).tokens.ravel().tolist()) <= held | {1}


def test_little_heldout_text_gives_one_padded_row(plan: DataPlan) -> None:
    size = len(plan.stores["cut"].heldout.tokens)
    batch = plan.heldout("cut", size + 10, 4)
    assert (batch.tokens.shape, batch.real_tokens) == ((1, size + 10), size)
    exact = plan.heldout("cut", size - 1, 4)
    assert (exact.tokens.shape, exact.real_tokens) == ((1, size - 1), size - 1)


@pytest.mark.parametrize(
    ("mixture", "context", "message"),
    [
        ({"cut": 1.0}, 5000, r"'cut' has \d+ tokens .* context 5000 needs 5001"),
        ({"whole": 1.0}, 4, r"'whole' has no document that fits whole into the context of 4"),
        ({"plain": 1.0}, 8, r"'plain': most tasks do not fit into the context of 8"),
    ],
)
def test_too_little_or_too_long(
    sources: dict[str, SourceConfig],
    tmp_path: Path,
    byte_tokenizer: Tokenizer,
    mixture: dict[str, float],
    context: int,
    message: str,
) -> None:
    with pytest.raises(UserError, match=message):
        DataPlan(sources, [phase(mixture, context)], byte_tokenizer, tmp_path, 0)


def test_sources_without_a_heldout_side(
    sources: dict[str, SourceConfig], tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    sources["cut"] = sources["cut"].model_copy(update={"heldout": 0.0})
    sources["plain"] = SourceConfig(kind="tasks", tasks=("talk",))
    plan = DataPlan(sources, [phase({"cut": 1, "plain": 1}, 120)], byte_tokenizer, tmp_path, 0)
    with pytest.raises(UserError, match="'cut' has no held-out documents"):
        plan.heldout("cut", 16, 2)
    with pytest.raises(UserError, match="'plain' generates nothing but talk"):
        plan.heldout("plain", 16, 2)


def test_conversations_have_up_to_as_many_turns_as_asked_for(
    sources: dict[str, SourceConfig], tmp_path: Path, byte_tokenizer: Tokenizer
) -> None:
    """A document of a conversation starts at position 0; each turn of it opens with a user."""
    several = {"chat": sources["chat"].model_copy(update={"turns": 3})}
    plan = DataPlan(several, [phase({"chat": 1.0}, context=1500)], byte_tokenizer, tmp_path, 0)
    batch = plan.batch(0, 0)
    counts = []
    for tokens, positions in zip(batch.tokens, batch.positions, strict=True):
        starts = [*(positions == 0).nonzero().ravel().tolist(), len(tokens)]
        for start, end in itertools.pairwise(starts):
            text = byte_tokenizer.decode(tokens[start:end].tolist(), skip_special=False)
            if not text.startswith("<pad>"):
                counts.append(text.count("<|im_start|>user"))
                assert text.count("<|im_start|>assistant") == counts[-1]
    assert set(counts) == {1, 2, 3}
