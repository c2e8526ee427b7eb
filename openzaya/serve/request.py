"""A request before and after its run: checks, limits, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from openzaya.data.tokenizer import Tokenizer
from openzaya.errors import UserError
from openzaya.model.model import Zaya
from openzaya.serve.sampling import SamplingSettings, generator_for
from openzaya.serve.text import Detokenizer, StopStrings

DEFAULT_NEW_TOKENS = 512
"""Where the user names no limit; less if the model's context has less room."""

FinishReason = Literal["stop", "length", "eos"]


@dataclass(frozen=True)
class Completion:
    """What became of one prompt.

    Attributes:
        text: without stop string and control tokens, but with `<think>` and `</think>`.
        ids: every sampled token, the one that ended the text included.
        finish_reason: "stop" at a stop string, "eos" at a stop token, "length" at the limit.
        prompt_tokens: tokens that were run before the first sampled one.
        prefill_seconds, decode_seconds: this row's batch was computing for so long, first until
            its prompts were through, then until this row ended.
    """

    text: str
    ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens of this row a second."""
        return self.prompt_tokens / max(self.prefill_seconds, 1e-9)

    @property
    def decode_rate(self) -> float:
        """Sampled tokens of this row a second; the first one comes from the prefill."""
        return (len(self.ids) - 1) / max(self.decode_seconds, 1e-9)


@dataclass(frozen=True)
class Event:
    """One sampled token.

    Attributes:
        row: number of the prompt.
        token: its id.
        text: what became certain with it; often empty or more than its own.
        completion: set on the last event of the row.
    """

    row: int
    token: int
    text: str
    completion: Completion | None


@dataclass
class Row:
    """A prompt on its way."""

    number: int
    prompt_tokens: int
    limit: int
    settings: SamplingSettings
    stop_ids: frozenset[int]
    generator: torch.Generator
    detokenizer: Detokenizer
    stop_strings: StopStrings
    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        """Take one token; its certain text, and why the row ends if it does."""
        self.ids.append(token)
        reason: FinishReason | None = None
        if token in self.stop_ids:
            text, reason = self.stop_strings.flush(), "eos"
        else:
            text, met = self.stop_strings.push(self.detokenizer.push(token))
            if met:
                reason = "stop"
            elif len(self.ids) == self.limit:
                text, reason = text + self.stop_strings.flush(), "length"
        self.pieces.append(text)
        return text, reason


def check_vocabulary(model: Zaya, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer with more tokens than the model has embeddings.

    Raises:
        UserError: naming both sizes.
    """
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model only "
            f"{model.config.vocab_size}: they do not belong together; use the tokenizer.json "
            "that the model was trained with"
        )


def stop_token_ids(model: Zaya, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The end of text, by the tokenizer and by the model's configuration.

    The configuration's id counts only where it is a control token: a model trained with another
    tokenizer than its configuration was written for must not end at an ordinary word.
    """
    configured = model.config.eos_token_id
    known = configured < tokenizer.vocab_size and is_control(tokenizer, configured)
    return (tokenizer.eos_id, configured) if known else (tokenizer.eos_id,)


def is_control(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token is left out of decoded text."""
    return not tokenizer.decode([token]) and bool(tokenizer.decode([token], skip_special=False))


def plan(
    model: Zaya,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings | Sequence[SamplingSettings],
    stop_ids: frozenset[int],
    used: int,
) -> list[Row]:
    """Check every prompt, and make its row; arguments and errors as in `generate.stream`.

    Args:
        used: tokens that a state has seen before the prompt.
    """
    if isinstance(settings, SamplingSettings):
        settings = [settings.for_row(row) for row in range(len(prompts))]
    elif len(settings) != len(prompts):
        raise ValueError(f"{len(settings)} settings for {len(prompts)} prompts")
    rows = []
    for number, (prompt, own) in enumerate(zip(prompts, settings, strict=True)):
        name = f"prompt {number + 1}" if len(prompts) > 1 else "the prompt"
        _check_ids(prompt, model.config.vocab_size, name)
        # The name of a control token has no text to be found in: it stops by its id.
        control = {
            found
            for text in own.stop
            if (found := tokenizer.token_id(text)) is not None and is_control(tokenizer, found)
        }
        rows.append(
            Row(
                number,
                len(prompt),
                new_token_limit(model, used + len(prompt), own.max_new_tokens, name),
                own,
                stop_ids | control,
                generator_for(own),
                Detokenizer(tokenizer, prompt),
                StopStrings(own.stop),
            )
        )
    return rows


def _check_ids(prompt: Sequence[int], vocabulary: int, name: str) -> None:
    if not prompt:
        raise UserError(f"{name} is empty: give at least one token of text to continue")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        bad = next(token for token in prompt if not 0 <= token < vocabulary)
        raise UserError(
            f"{name} has the token id {bad}, outside the model's vocabulary of {vocabulary}: "
            "encode it with the model's own tokenizer"
        )


def new_token_limit(model: Zaya, prompt: int, asked: int | None, name: str) -> int:
    """How many tokens may follow `prompt` tokens.

    Args:
        asked: the user's limit; None takes the default, cut to what fits.
        name: of the prompt, in errors.

    Raises:
        UserError: if they do not fit the model's context together.
    """
    context = model.config.max_position_embeddings
    if asked is not None and prompt + asked > context:
        raise UserError(
            f"{name} has {prompt} tokens and asks for {asked} more, {prompt + asked} together; "
            f"the model's context is {context}: shorten the prompt, or ask for at most "
            f"{max(context - prompt, 0)} new tokens"
        )
    if prompt >= context:
        raise UserError(
            f"{name} has {prompt} tokens and leaves no room in the model's context of {context}: "
            "shorten it"
        )
    return min(DEFAULT_NEW_TOKENS, context - prompt) if asked is None else asked
