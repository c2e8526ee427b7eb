"""Cached forwards, in any cut and with any padding, against one uncached forward.

Where not said otherwise the oracle is our own uncached, unpadded forward of the row alone, which
`test_parity.py` compares with transformers. transformers itself is no oracle for padded chunks
after the first: it masks padding out of the convolution only in a first forward.
"""

from __future__ import annotations

import random

import pytest
import torch

from openzaya.model.model import Zaya
from openzaya.model.state import SequenceState
from tests.model.helpers import (
    TOLERANCE,
    check_gradients,
    chunked_logits,
    pad_rows,
    plain_logits,
    small_model,
    tokens_for,
)
from tests.oracle import pair, random_geometry, random_tokens, relative_error

SEQ = 17
VARIANTS = {
    "mixed": {},
    "long-kernels": {"cca_time0": 4, "cca_time1": 4},
    "uneven-kernels": {"cca_time0": 2, "cca_time1": 4, "num_key_value_heads": 1},
    "one-tap": {"cca_time0": 1, "cca_time1": 1},
    "window-1": {"sliding_window": 1},
    "window-2": {"sliding_window": 2, "cca_time0": 3},
    "all-full": {"layer_types": None, "sliding_window": None},
    "all-sliding": {"layer_types": ("hybrid_sliding",) * 3, "sliding_window": 5},
    "standard": {"attention": "standard"},
    "linear-plain": {"router": "linear", "residual": "plain", "skip_expert": "identity"},
}


@pytest.fixture(scope="module", params=VARIANTS)
def model(request) -> Zaya:
    return small_model(7, **VARIANTS[request.param])


def test_token_by_token(model):
    tokens = tokens_for(model, 2, SEQ)
    expected = plain_logits(model, tokens)
    assert relative_error(chunked_logits(model, tokens, [1] * SEQ), expected) < TOLERANCE


def test_every_split_point(model):
    tokens = tokens_for(model, 2, SEQ)
    expected = plain_logits(model, tokens)
    for cut in range(1, SEQ):
        actual = chunked_logits(model, tokens, [cut, SEQ - cut])
        assert relative_error(actual, expected) < TOLERANCE, f"cut after {cut}"


def test_three_random_chunks(model):
    tokens = tokens_for(model, 2, SEQ)
    expected = plain_logits(model, tokens)
    for seed in range(6):
        a, b = sorted(random.Random(seed).sample(range(1, SEQ), 2))
        sizes = [a, b - a, SEQ - b]
        assert relative_error(chunked_logits(model, tokens, sizes), expected) < TOLERANCE, sizes


def _ragged(
    model: Zaya, lengths: list[list[int]], style: str, seed: int, capacity: int = 2
) -> SequenceState:
    """Run rows in padded chunks and compare each with the row alone.

    Args:
        lengths: tokens of every row in every chunk, [chunks][rows].
    """
    rows_count = len(lengths[0])
    totals = [sum(chunk[row] for chunk in lengths) for row in range(rows_count)]
    rows = [tokens_for(model, 1, total, seed + i)[0] for i, total in enumerate(totals)]
    done = [0] * rows_count
    outputs: list[list[torch.Tensor]] = [[] for _ in rows]
    state = model.new_state(rows_count, capacity)
    for number, chunk in enumerate(lengths):
        parts = [row[at : at + n] for row, at, n in zip(rows, done, chunk, strict=True)]
        width = max(
            1, max(chunk) + (number + seed) % 2
        )  # at times a column is padding in every row
        tokens, mask = pad_rows(parts, width, style, seed + number, model.config.vocab_size)
        with torch.no_grad():
            output = model(tokens, padding_mask=mask, state=state)
        assert bool((output.hidden[~mask] == 0).all())
        assert (output.load.sum(1) == sum(chunk)).all(), "padding was counted"
        for i in range(rows_count):
            outputs[i].append(output.hidden[i][mask[i]])
        done = [a + b for a, b in zip(done, chunk, strict=True)]
        assert state.lengths == done
    for i, row in enumerate(rows):
        expected = plain_logits(model, row[None])[0]
        actual = model.logits(torch.cat(outputs[i])).detach()
        assert relative_error(actual, expected) < TOLERANCE, f"row {i} of {lengths}, {style}"
    return state


@pytest.mark.parametrize("style", ["left", "right", "holes"])
def test_ragged_batch_in_first_and_continued_chunks(model, style):
    for seed in range(4):
        rng = random.Random(seed)
        lengths = [[rng.randint(1, 7) for _ in range(3)] for _ in range(3)]
        _ragged(model, lengths, style, seed)


@pytest.mark.parametrize("style", ["left", "right", "holes"])
def test_rows_without_any_token_in_a_chunk(model, style):
    _ragged(model, [[0, 5], [6, 0], [3, 2], [0, 1]], style, 1)
    _ragged(model, [[4, 9], [0, 0], [1, 0], [7, 8]], style, 2)
    _ragged(model, [[4], [0], [3]], style, 3)


@pytest.mark.parametrize("style", ["left", "right"])
def test_left_padded_second_chunk(model, style):
    """The case that transformers gets wrong: padding between what is cached and the new tokens."""
    _ragged(model, [[6, 6], [2, 5]], style, 4)
    _ragged(model, [[5, 2], [1, 3], [1, 1], [1, 0]], style, 5)


@pytest.mark.parametrize("style", ["left", "right", "holes"])
def test_batch_of_one_with_padding(model, style):
    row = tokens_for(model, 1, 9)
    tokens, mask = pad_rows([row[0]], 14, style, 3, model.config.vocab_size)
    expected = plain_logits(model, row)[0]
    with torch.no_grad():
        uncached = model(tokens, padding_mask=mask).hidden[0][mask[0]]
        as_int = model(tokens, padding_mask=mask.long()).hidden[0][mask[0]]
    assert relative_error(model.logits(uncached).detach(), expected) < TOLERANCE
    assert torch.equal(as_int, uncached)
    _ragged(model, [[9], [1], [6]], style, 6)


@pytest.mark.parametrize("style", ["left", "right", "holes"])
def test_padding_changes_neither_loss_nor_gradients(model, style):
    """Oracle: the rows one by one, their losses added."""
    rows = [tokens_for(model, 1, n, n)[0] for n in (11, 4, 7)]
    model.zero_grad()
    alone = torch.zeros(())
    for row in rows:
        loss = model.loss(model(row[None, :-1]).hidden, row[None, 1:])
        loss.backward()
        alone += loss.detach()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    vocab = model.config.vocab_size
    tokens, mask = pad_rows([row[:-1] for row in rows], 12, style, 0, vocab)
    targets, _ = pad_rows([row[1:] for row in rows], 12, style, 0, vocab)
    loss = model.loss(model(tokens, padding_mask=mask).hidden, targets.masked_fill(~mask, -100))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(alone), rel=TOLERANCE)
    check_gradients(model, expected)
    model.zero_grad()


@pytest.mark.parametrize("window", [1, 2, 3, 6])
@pytest.mark.parametrize("kinds", [("hybrid_sliding",) * 2, ("hybrid", "hybrid_sliding")])
def test_chunks_longer_than_the_window(window, kinds):
    model = small_model(3, num_hidden_layers=2, layer_types=kinds, sliding_window=window)
    tokens = tokens_for(model, 2, 30)
    expected = plain_logits(model, tokens)
    for sizes in ([30], [3, 27], [20, 1, 9], [1, 7, 7, 15], [window, window + 1, 29 - 2 * window]):
        state = model.new_state(2, 1)
        actual = chunked_logits(model, tokens, sizes, state)
        assert relative_error(actual, expected) < TOLERANCE, sizes
        for layer in state.layers:
            if layer.layer_type == "hybrid_sliding":
                assert layer.k.shape[1] <= window, "a sliding layer holds more than its window"


def test_no_buffer_entry_is_written_twice_in_one_forward():
    """Which of two writes to the same entry wins is undefined, on an accelerator at least."""
    state = small_model(0).new_state(2, 20)
    state.lengths = [3, 0]
    access = state.access("hybrid_sliding", 9, [9, 7])
    targets = list(zip(access.rows.tolist(), access.target.tolist(), strict=True))
    assert len(targets) == len(set(targets)) == 8
    kept = sorted(zip(access.rows.tolist(), access.source.tolist(), strict=True))
    assert kept == [(0, 5), (0, 6), (0, 7), (0, 8), (1, 3), (1, 4), (1, 5), (1, 6)]


@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_window_is_felt(window):
    """The comparisons are blind if the window never matters: without it the logits differ."""
    model = small_model(7, sliding_window=window)
    wider = Zaya(model.config.model_copy(update={"sliding_window": SEQ}))
    wider.load_state_dict(model.state_dict())
    tokens = tokens_for(model, 1, SEQ)
    narrow, wide = plain_logits(model, tokens), plain_logits(wider, tokens)
    assert relative_error(wide[:, :window], narrow[:, :window]) < TOLERANCE
    assert (wide - narrow).abs().amax(-1)[:, window:].min() > 1e-3


def test_growth_beyond_capacity(model):
    """Oracle: the same with room for everything from the start."""
    tokens = tokens_for(model, 3, SEQ)
    roomy = chunked_logits(model, tokens, [5, 1, 1, 10], model.new_state(3, 64))
    for capacity in (1, 2, 5, 6, 16):
        state = model.new_state(3, capacity)
        actual = chunked_logits(model, tokens, [5, 1, 1, 10], state)
        assert relative_error(actual, roomy) < TOLERANCE, capacity
        assert state.capacity >= SEQ
        assert state.nbytes >= state.kv_nbytes > 0
    exact = model.new_state(3, SEQ)
    before = exact.nbytes
    chunked_logits(model, tokens, [5, 1, 1, 10], exact)
    assert exact.nbytes == before, "a state that had enough room grew"


def test_select_reorders_repeats_and_copies(model):
    tokens = tokens_for(model, 3, SEQ)
    expected = plain_logits(model, tokens)
    state = model.new_state(3, 4)
    head = 9
    with torch.no_grad():
        for chunk in (tokens[:, :4], tokens[:, 4:head]):
            model(chunk, state=state)
        picks = [2, 0, 2, 1]
        branch = state.select(picks)
        assert branch.lengths == [head] * 4
        assert state.lengths == [head] * 3
        others = tokens_for(model, 4, 3, seed=5)
        model(others, state=branch)  # must not touch the original, nor its own twin
        rest = model.logits(model(tokens[:, head:], state=state).hidden)
    assert relative_error(rest, expected[:, head:]) < TOLERANCE
    full = torch.cat([tokens[picks, :head], others], dim=1)
    with torch.no_grad():
        more = model.logits(model(others.flip(1), state=branch).hidden)
    expected = plain_logits(model, torch.cat([full, others.flip(1)], dim=1))[:, -3:]
    assert relative_error(more, expected) < TOLERANCE


def test_select_of_rows_with_different_lengths(model):
    rows = [tokens_for(model, 1, n, n)[0] for n in (3, 10)]
    state = model.new_state(2, 2)
    tokens, mask = pad_rows(rows, 10, "left", 0, model.config.vocab_size)
    follow = tokens_for(model, 1, 2, 9)
    with torch.no_grad():
        model(tokens, padding_mask=mask, state=state)
        short = state.select([0])
        assert short.lengths == [3]
        actual = model.logits(model(follow, state=short).hidden)
    expected = plain_logits(model, torch.cat([rows[0][None], follow], dim=1))[:, -2:]
    assert relative_error(actual, expected) < TOLERANCE


def test_state_of_another_batch_size_is_refused(model):
    with pytest.raises(ValueError, match=r"2 sequences.*3"):
        model(tokens_for(model, 3, 4), state=model.new_state(2))


@pytest.mark.parametrize("seed", range(66, 78))
def test_greedy_tokens_of_transformers(seed):
    """Oracle: transformers' `generate`, cached and greedy, at its own cached logits."""
    config = random_geometry(seed)
    oracle, ours = pair(config, seed)
    oracle.generation_config.eos_token_id = None
    tokens = random_tokens(config, 2, 5, seed)
    expected = oracle.generate(tokens, max_new_tokens=20, do_sample=False, use_cache=True)
    state = ours.new_state(2, 1)
    out, chunk = [tokens], tokens
    with torch.no_grad():
        for _ in range(20):
            chunk = ours.logits(ours(chunk, state=state).hidden[:, -1]).argmax(-1, keepdim=True)
            out.append(chunk)
    assert torch.equal(torch.cat(out, dim=1), expected)
    assert state.lengths == [24, 24]


@pytest.mark.parametrize("seed", range(66, 74))
def test_left_padded_first_chunk_of_transformers(seed):
    """Oracle: transformers with a mask and positions counted from the first real token."""
    config = random_geometry(seed)
    oracle, ours = pair(config, seed)
    rows = [random_tokens(config, 1, n, n)[0] for n in (12, 3, 7)]
    tokens, mask = pad_rows(rows, 12, "left", seed, config.vocab_size)
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        expected = oracle(tokens, attention_mask=mask.long(), position_ids=positions).logits
        actual = ours.logits(ours(tokens, padding_mask=mask).hidden)
    assert relative_error(actual[mask], expected[mask]) < TOLERANCE


def test_bf16_state_keeps_its_tail_in_fp32():
    """Oracle: the decision that conv tail and lagged value are fp32 whatever the compute dtype."""
    model = small_model(1, torch.bfloat16)
    state = model.new_state(2, 2)
    with torch.no_grad():
        for chunk in tokens_for(model, 2, 9).split([4, 1, 4], dim=1):
            model(chunk, state=state)
    for layer in state.layers:
        assert layer.k.dtype == layer.v.dtype == torch.bfloat16
        assert layer.conv_tail.dtype == layer.lagged_value.dtype == torch.float32
