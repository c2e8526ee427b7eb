"""A conversation that remembers: each turn runs only the tokens that are new.

The state of the model after an answer is that of the whole conversation so far, bit for bit what
one long prompt would leave but for rounding. The next turn continues it. Where a template shows
earlier turns otherwise than they went (without their reasoning), the session goes back to a copy
of the state it took before the last answer began, which is as far as the two agree: state of
convolutions cannot be cut back like keys and values can.
"""

from __future__ import annotations

from collections.abc import Generator

from openzaya.data.tokenizer import Tokenizer
from openzaya.errors import UserError
from openzaya.model.model import Zaya
from openzaya.model.state import SequenceState
from openzaya.serve.chat_format import ChatFormat, Prompt, Turn
from openzaya.serve.generate import run_tokens, stream
from openzaya.serve.request import Completion, check_vocabulary, new_token_limit, stop_token_ids
from openzaya.serve.sampling import SamplingSettings
from openzaya.serve.text import Piece, ThinkSplitter


class ChatSession:
    """One conversation with one model.

    Args:
        settings: of every turn; turn number t draws as row t of a batch would.
        system: a first message that sets the tone.
        thinking: open the reasoning of every answer.

    Attributes:
        turns: the conversation so far.
        settings, thinking: may be changed between turns.
        last: how the last answer ended; None if it was interrupted.
    """

    def __init__(
        self,
        model: Zaya,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        settings: SamplingSettings | None = None,
        system: str | None = None,
        thinking: bool = False,
    ) -> None:
        check_vocabulary(model, tokenizer)
        self.settings = settings or SamplingSettings()
        self.thinking = thinking
        self.last: Completion | None = None
        self._model, self._tokenizer, self._format = model, tokenizer, chat_format
        self._system = system
        self._stop_ids = (*stop_token_ids(model, tokenizer), *chat_format.stop_ids)
        self.reset()

    def reset(self) -> None:
        """Forget all turns but the system's."""
        self.turns: list[Turn] = []
        if self._system is not None:
            self.turns.append(Turn("system", self._system))
        self._seen: list[int] = []
        self._state: SequenceState | None = None
        self._copy: tuple[list[int], SequenceState] | None = None

    @property
    def seen(self) -> list[int]:
        """The tokens that the state has passed over."""
        return list(self._seen)

    @property
    def state(self) -> SequenceState | None:
        """The model's state after `seen`; None before the first turn."""
        return self._state

    def ask(self, text: str) -> Generator[Piece, None, None]:
        """Say something, and stream the answer.

        The turn counts as soon as a token of the answer is there. Closing the iterator early keeps
        what has come, and so does an exception; after one the next turn runs the whole
        conversation again, as the state may have stopped half-way through the layers.

        Raises:
            UserError: before anything runs, if the conversation no longer fits the context.
        """
        user = Turn("user", text)
        prompt = self._format.prompt([*self.turns, user], self.thinking)
        try:
            limit = self.settings.max_new_tokens
            new_token_limit(self._model, len(prompt.ids), limit, "the conversation")
        except UserError as error:
            raise UserError(f"{error}; or start a new conversation") from error
        return self._answer(user, prompt)

    def _answer(self, user: Turn, prompt: Prompt) -> Generator[Piece, None, None]:
        number = sum(turn.role == "assistant" for turn in self.turns)
        splitter = ThinkSplitter(thinking=bool(prompt.opened))
        sampled: list[int] = []
        said: list[str] = []
        self.last = None
        try:
            state = self._continue(prompt)
            events = stream(
                self._model,
                self._tokenizer,
                [prompt.ids[len(self._seen) :]],
                [self.settings.for_row(number)],
                self._stop_ids,
                state,
            )
            for event in events:
                sampled.append(event.token)
                said.append(event.text)
                self.last = event.completion
                yield from splitter.push(event.text)
            yield from splitter.flush()
        except GeneratorExit:  # the reader left between two tokens: the state is whole
            raise
        except BaseException:
            self._state = self._copy = None
            raise
        finally:
            if sampled:
                self._seen = [*prompt.ids, *sampled[:-1]]
                self.turns += [user, self._turn(prompt, sampled, "".join(said))]

    def _turn(self, prompt: Prompt, sampled: list[int], said: str) -> Turn:
        """The assistant's turn as later prompts will show it."""
        content = prompt.opened + said
        reason = self.last.finish_reason if self.last else None
        if reason == "stop":
            return Turn("assistant", content)  # its tokens go on into the stop string
        answer = sampled[:-1] if reason == "eos" else sampled
        return Turn("assistant", content, [*prompt.opened_ids, *answer])

    def _continue(self, prompt: Prompt) -> SequenceState:
        """A state whose tokens `self._seen` begin `prompt`, as many of them as we have."""
        known = [] if self._state is None else [(self._seen, self._state)]
        known += [] if self._copy is None else [self._copy]
        for seen, state in known:
            if len(seen) < len(prompt.ids) and prompt.ids[: len(seen)] == seen:
                self._seen, self._state = seen, state
                break
        else:
            limit = new_token_limit(
                self._model, len(prompt.ids), self.settings.max_new_tokens, "the conversation"
            )
            self._seen = []
            self._state = self._model.new_state(1, capacity=len(prompt.ids) + limit)
        self._copy = None
        if self._format.rewrites_history and len(self._seen) < prompt.settled:
            run_tokens(self._model, prompt.ids[len(self._seen) : prompt.settled], self._state)
            self._seen = prompt.ids[: prompt.settled]
            self._copy = (self._seen, self._state.select([0]))
        return self._state
