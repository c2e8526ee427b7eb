"""Packed documents: positions that restart at zero are borders that nothing crosses.

The oracle is each document run alone through our own forward (which `test_parity.py` compares with
transformers). transformers is no oracle here: its convolutions and its value shift run across the
borders of packed documents, whatever positions and masks say.
"""

from __future__ import annotations

import random

import pytest
import torch

from openzaya.model.model import Zaya
from tests.model.helpers import (
    TOLERANCE,
    check_gradients,
    pad_rows,
    plain_logits,
    small_model,
    tokens_for,
)
from tests.oracle import relative_error

VARIANTS = {
    "taps-2-2": {},
    "taps-3-2": {"cca_time0": 3},
    "taps-2-4": {"cca_time1": 4},
    "taps-4-3": {"cca_time0": 4, "cca_time1": 3, "sliding_window": 3},
    "all-full": {"layer_types": None, "cca_time0": 4, "cca_time1": 4},
    "all-sliding": {"layer_types": ("hybrid_sliding",) * 3, "sliding_window": 2},
    "standard": {"attention": "standard"},
    "linear-plain": {"router": "linear", "residual": "plain", "skip_expert": "none"},
}
LENGTHS = [5, 1, 2, 7, 1, 1, 3]


@pytest.fixture(scope="module", params=VARIANTS)
def model(request) -> Zaya:
    return small_model(11, **VARIANTS[request.param])


def _documents(model: Zaya, lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    return [tokens_for(model, 1, n, 100 * seed + i)[0] for i, n in enumerate(lengths)]


def _positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


def _alone(model: Zaya, documents: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([plain_logits(model, document[None])[0] for document in documents])


def test_logits(model):
    rows = [_documents(model, LENGTHS, 0), _documents(model, LENGTHS[::-1], 1)]
    tokens = torch.stack([torch.cat(row) for row in rows])
    positions = torch.stack([_positions(LENGTHS), _positions(LENGTHS[::-1])])
    with torch.no_grad():
        actual = model.logits(model(tokens, positions).hidden)
    expected = torch.stack([_alone(model, row) for row in rows])
    assert relative_error(actual, expected) < TOLERANCE


def test_one_document_with_positions_is_the_plain_forward(model):
    tokens = tokens_for(model, 2, 12)
    with torch.no_grad():
        actual = model.logits(model(tokens, torch.arange(12).expand(2, 12)).hidden)
    assert relative_error(actual, plain_logits(model, tokens)) < TOLERANCE


def test_the_border_is_felt(model):
    """The comparison is blind if borders do not matter: without them the logits differ."""
    documents = _documents(model, LENGTHS)
    joined = plain_logits(model, torch.cat(documents)[None])[0]
    expected = _alone(model, documents)
    assert relative_error(joined[:5], expected[:5]) < TOLERANCE
    assert relative_error(joined[5:], expected[5:]) > 1e-2


def test_loss_and_gradients(model):
    documents = _documents(model, LENGTHS, 2)
    model.zero_grad()
    alone = torch.zeros(())
    for document in documents:
        targets = torch.cat([document[1:], document.new_tensor([-100])])
        loss = model.loss(model(document[None]).hidden, targets[None])
        loss.backward()
        alone += loss.detach()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    tokens = torch.cat(documents)
    targets = torch.cat([tokens[1:], tokens.new_tensor([-100])])
    targets[torch.tensor(LENGTHS).cumsum(0) - 1] = -100
    hidden = model(tokens[None], _positions(LENGTHS)[None]).hidden
    loss = model.loss(hidden, targets[None])
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(alone), rel=TOLERANCE)
    check_gradients(model, expected)
    model.zero_grad()


def test_every_split_point_of_a_cached_packed_row(model):
    documents = _documents(model, LENGTHS, 3)
    tokens, positions = torch.cat(documents)[None], _positions(LENGTHS)[None]
    expected = _alone(model, documents)[None]
    seq = tokens.shape[1]
    for cut in range(1, seq):
        state = model.new_state(1, 1)
        with torch.no_grad():
            a = model(tokens[:, :cut], positions[:, :cut], state=state).hidden
            b = model(tokens[:, cut:], positions[:, cut:], state=state).hidden
        actual = model.logits(torch.cat([a, b], dim=1)).detach()
        assert relative_error(actual, expected) < TOLERANCE, f"cut after {cut}"
        assert state.lengths == [seq]
        assert state.document_starts == [seq - LENGTHS[-1]]


def test_packed_row_token_by_token(model):
    documents = _documents(model, LENGTHS, 4)
    tokens, positions = torch.cat(documents)[None], _positions(LENGTHS)[None]
    state = model.new_state(1, 1)
    with torch.no_grad():
        hidden = [
            model(tokens[:, i : i + 1], positions[:, i : i + 1], state=state).hidden
            for i in range(tokens.shape[1])
        ]
    actual = model.logits(torch.cat(hidden, dim=1)).detach()[0]
    assert relative_error(actual, _alone(model, documents)) < TOLERANCE


@pytest.mark.parametrize("step", [1, 4])
def test_continuing_the_last_document_without_positions(model, step):
    """Positions of None continue the current document, even one that began within the cache."""
    lengths = [4, 5]
    documents = _documents(model, lengths, 5)
    tokens, positions = torch.cat(documents)[None], _positions(lengths)[None]
    expected = _alone(model, documents)[None]
    for cut in range(5, 9):
        state = model.new_state(1, 1)
        with torch.no_grad():
            hidden = [model(tokens[:, :cut], positions[:, :cut], state=state).hidden]
            for chunk in tokens[:, cut:].split(step, dim=1):
                hidden.append(model(chunk, state=state).hidden)
        actual = model.logits(torch.cat(hidden, dim=1)).detach()
        assert relative_error(actual, expected) < TOLERANCE, f"{cut - 4} tokens were cached"


@pytest.mark.parametrize("style", ["left", "right", "holes"])
def test_packed_and_padded(model, style):
    """Rows of different numbers of documents, in one forward and in two cached ones."""
    plans = [[3, 4, 2], [6], [1, 1, 2]]
    rows = [_documents(model, plan, 6 + i) for i, plan in enumerate(plans)]
    expected = [_alone(model, row) for row in rows]
    flat = [torch.cat(row) for row in rows]
    spots = [_positions(plan) for plan in plans]
    for cuts in ([9, 6, 4], [5, 5, 1], [4, 0, 3], [3, 6, 2]):
        state = model.new_state(3, 1)
        got: list[list[torch.Tensor]] = [[], [], []]
        for part in (0, 1):
            ends = [(0, c) if part == 0 else (c, None) for c in cuts]
            ids = [row[a:b] for row, (a, b) in zip(flat, ends, strict=True)]
            if not max(len(row) for row in ids):
                continue
            places = [row[a:b] for row, (a, b) in zip(spots, ends, strict=True)]
            tokens, mask = pad_rows(ids, 10, style, part, model.config.vocab_size)
            positions, _ = pad_rows(places, 10, style, part, 10)
            with torch.no_grad():
                hidden = model(tokens, positions, mask, state).hidden
            for i in range(3):
                got[i].append(hidden[i][mask[i]])
        for i in range(3):
            actual = model.logits(torch.cat(got[i])).detach()
            assert relative_error(actual, expected[i]) < TOLERANCE, (cuts, i)


def test_random_packings(model):
    for seed in range(5):
        rng = random.Random(seed)
        lengths = [rng.randint(1, 6) for _ in range(6)]
        documents = _documents(model, lengths, 20 + seed)
        tokens, positions = torch.cat(documents)[None], _positions(lengths)[None]
        a, b = sorted(rng.sample(range(1, tokens.shape[1]), 2))
        state = model.new_state(1, rng.randint(1, 8))
        with torch.no_grad():
            hidden = [
                model(tokens[:, c], positions[:, c], state=state).hidden
                for c in (slice(0, a), slice(a, b), slice(b, None))
            ]
        actual = model.logits(torch.cat(hidden, dim=1)).detach()[0]
        assert relative_error(actual, _alone(model, documents)) < TOLERANCE, lengths
