"""Prompts in, text out: ragged rows in one batch, cached, one column of tokens a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from openzaya.data.tokenizer import Tokenizer
from openzaya.errors import UserError
from openzaya.model.model import Zaya
from openzaya.model.state import SequenceState
from openzaya.serve.request import Completion, Event, Row, check_vocabulary, plan, stop_token_ids
from openzaya.serve.sampling import SamplingSettings, sample


def generate(
    model: Zaya,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings | Sequence[SamplingSettings],
    on_text: Callable[[int, str], None] | None = None,
    stop_ids: Sequence[int] | None = None,
) -> list[Completion]:
    """Complete all prompts; arguments and errors as in `stream`.

    Args:
        on_text: called with the row's number and each new piece of its text.

    Returns:
        One completion a prompt, in order.
    """
    done: dict[int, Completion] = {}
    for event in stream(model, tokenizer, prompts, settings, stop_ids):
        if event.text and on_text is not None:
            on_text(event.row, event.text)
        if event.completion is not None:
            done[event.row] = event.completion
    return [done[row] for row in range(len(prompts))]


def stream(
    model: Zaya,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings | Sequence[SamplingSettings],
    stop_ids: Sequence[int] | None = None,
    state: SequenceState | None = None,
) -> Iterator[Event]:
    """Complete prompts token by token. All checks come before the first forward.

    Equal prompts are run once. Rows that end leave the batch, so that they cost nothing more.

    Args:
        prompts: token ids, at least one each.
        settings: one for all rows (row r gets `settings.for_row(r)`), or one a row.
        stop_ids: tokens that end a row; None takes those of `stop_token_ids`.
        state: what earlier calls left of a single sequence; the prompt continues it, and it ends
            up with all tokens but the last sampled one. Valid whenever the iterator is at a yield.

    Raises:
        UserError: if a prompt is empty, has an id outside the vocabulary, or does not fit the
            context with its new tokens; if tokenizer and model do not belong together; if the
            model's output is not finite.
    """
    check_vocabulary(model, tokenizer)
    used = state.lengths[0] if state is not None else 0
    if state is not None and len(prompts) != 1:
        raise ValueError("a state is continued by exactly one prompt")
    ends = stop_token_ids(model, tokenizer) if stop_ids is None else stop_ids
    rows = plan(model, tokenizer, prompts, settings, frozenset(ends), used)
    return _run(model, prompts, rows, state)


def _run(
    model: Zaya,
    prompts: Sequence[Sequence[int]],
    rows: list[Row],
    state: SequenceState | None,
) -> Iterator[Event]:
    if not rows:
        return
    clock = time.perf_counter()
    logits, state = _prefill(model, prompts, state, max(row.limit for row in rows))
    sampled = _sample(logits, rows)
    prefill = time.perf_counter() - clock
    decode = 0.0
    while True:
        events, going = [], []
        for place, (row, token) in enumerate(zip(rows, sampled, strict=True)):
            text, reason = row.push(token)
            completion = None
            if reason is None:
                going.append(place)
            else:
                completion = Completion(
                    "".join(row.pieces), row.ids, reason, row.prompt_tokens, prefill, decode
                )
            events.append(Event(row.number, token, text, completion))
        yield from events
        if not going:
            return
        clock = time.perf_counter()  # what the reader does between steps is not ours
        if len(going) < len(rows):
            rows = [rows[place] for place in going]
            state = state.select(going)
        column = [[row.ids[-1]] for row in rows]
        logits = _forward(model, column, None, state, [0] * len(rows))
        sampled = _sample(logits, rows)
        decode += time.perf_counter() - clock


def _prefill(
    model: Zaya, prompts: Sequence[Sequence[int]], state: SequenceState | None, new_tokens: int
) -> tuple[Tensor, SequenceState]:
    """Run all prompts; fp32 logits [batch, vocab] after each one's last token, and the state."""
    unique = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    lengths = [len(prompt) for prompt in unique]
    longest = max(lengths)
    if state is None:
        state = model.new_state(len(unique), capacity=longest + new_tokens)
    else:
        state.reserve(state.lengths[0] + longest + new_tokens)
    padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in unique]
    mask = None
    if min(lengths) < longest:
        mask = torch.tensor([[i < length for i in range(longest)] for length in lengths])
    logits = _forward(model, padded, mask, state, [length - 1 for length in lengths])
    if len(unique) < len(prompts):
        place = {prompt: number for number, prompt in enumerate(unique)}
        which = [place[tuple(prompt)] for prompt in prompts]
        logits, state = logits[which], state.select(which)
    return logits, state


@torch.inference_mode()
def run_tokens(model: Zaya, ids: Sequence[int], state: SequenceState) -> None:
    """Let a single sequence's state pass over `ids`, with no interest in what comes next."""
    model(torch.tensor([list(ids)], device=model.head_weight.device), state=state)


@torch.inference_mode()
def _forward(
    model: Zaya,
    tokens: list[list[int]],
    mask: Tensor | None,
    state: SequenceState,
    last: list[int],
) -> Tensor:
    """One forward of [batch][seq] ids; fp32 logits [batch, vocab] at column last[row]."""
    device = model.head_weight.device
    ids = torch.tensor(tokens, device=device)
    mask = None if mask is None else mask.to(device)
    hidden = model(ids, padding_mask=mask, state=state).hidden
    row = torch.arange(len(last), device=device)
    return model.logits(hidden[row, torch.tensor(last, device=device)])


@torch.inference_mode()
def _sample(logits: Tensor, rows: list[Row]) -> list[int]:
    if not bool(logits.isfinite().all()):
        raise UserError(
            "the model's logits are not finite: its weights are damaged or overflow in this "
            "dtype; try float32, or another checkpoint"
        )
    return sample(logits, [row.settings for row in rows], [row.generator for row in rows])
