from __future__ import annotations

from typing import Any

import pytest
import torch

from openzaya.data.chat import CHAT_TEMPLATE, encode_chat
from openzaya.errors import UserError
from openzaya.model.model import Zaya
from openzaya.serve.chat_format import ChatFormat, NativeFormat, TemplateFormat, Turn
from openzaya.serve.sampling import SamplingSettings
from openzaya.serve.session import ChatSession
from tests.serve.helpers import lively_model, tokenizer

GREEDY = SamplingSettings(temperature=0, max_new_tokens=9)
CONTROL = ("<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")

# Drops the reasoning of earlier answers, as many templates do.
FORGETFUL = (
    "{%- for message in messages %}\n"
    "  {%- set content = message.content %}\n"
    "  {%- if message.role == 'assistant' and '</think>' in content %}\n"
    "    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n"
    "  {%- endif %}\n"
    "{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\n"
    "{%- if enable_thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)


def template(source: str = CHAT_TEMPLATE) -> TemplateFormat:
    return TemplateFormat(tokenizer(), source, CONTROL, {"eos_token": "<eos>"})


@pytest.fixture(scope="module")
def model() -> Zaya:
    return lively_model(layer_types=("hybrid_sliding", "hybrid"), sliding_window=7)


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Columns of every forward."""
    seen: list[int] = []
    forward = Zaya.forward

    def watched(self: Zaya, tokens: torch.Tensor, **kwargs: Any) -> Any:
        seen.append(tokens.shape[1])
        return forward(self, tokens, **kwargs)

    monkeypatch.setattr(Zaya, "forward", watched)
    return seen


def say(session: ChatSession, text: str) -> str:
    return "".join(piece.text for piece in session.ask(text))


@torch.no_grad()
def assert_state_is_that_of_one_run(session: ChatSession) -> None:
    state = session.state
    assert state is not None
    again = session._model.new_state(1)
    session._model(torch.tensor([session.seen]), state=again)
    assert state.lengths == again.lengths == [len(session.seen)]
    for ours, other in zip(state.layers, again.layers, strict=True):
        slots = min(len(session.seen), other.k.shape[1])
        for name in ("k", "v"):
            a, b = getattr(ours, name)[:, :slots], getattr(other, name)[:, :slots]
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.conv_tail, other.conv_tail, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.lagged_value, other.lagged_value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [lambda: NativeFormat(tokenizer()), template])
@pytest.mark.parametrize("thinking", [False, True])
def test_each_turn_runs_only_what_is_new(
    make: Any, thinking: bool, model: Zaya, widths: list[int]
) -> None:
    session = ChatSession(model, tokenizer(), make(), GREEDY, "be brief", thinking)
    for text in ("The user asks", "2+2=4", "and emoji 🦊"):
        before = len(session.seen)
        widths.clear()
        say(session, text)
        assert sum(widths) == len(session.seen) - before  # nothing is run twice
        widths.clear()
        assert_state_is_that_of_one_run(session)
    assert [turn.role for turn in session.turns] == ["system", *["user", "assistant"] * 3]


def test_the_state_holds_the_conversation_as_training_encodes_it(model: Zaya) -> None:
    session = ChatSession(model, tokenizer(), NativeFormat(tokenizer()), GREEDY)
    say(session, "The user asks")
    first = session.turns[1]
    say(session, "and <|im_end|> too")
    assert first.ids is not None
    head = encode_chat([{"role": "user", "content": "The user asks"}], tokenizer(), True)[0]
    ids = [*head, *first.ids]
    assert session.seen[: len(ids)] == ids
    end = tokenizer().token_id("<|im_end|>")
    # two user turns and the first answer are closed, and nobody else has closed anything
    assert session.seen[: len(session.seen) - 8].count(end) == 3


def test_answers_equal_those_of_a_session_without_memory(model: Zaya) -> None:
    session = ChatSession(model, tokenizer(), NativeFormat(tokenizer()), GREEDY)
    say(session, "The user asks")
    fresh = ChatSession(model, tokenizer(), NativeFormat(tokenizer()), GREEDY)
    fresh.turns = list(session.turns)
    assert say(session, "Two and two") == say(fresh, "Two and two")


def test_a_template_that_forgets_reasoning_goes_back_to_the_copy(
    model: Zaya, widths: list[int]
) -> None:
    session = ChatSession(model, tokenizer(), template(FORGETFUL), GREEDY, "s" * 60, True)
    say(session, "The user asks")
    # The model never closes its reasoning by itself: do it for it.
    closed = session.turns[-1].content + "</think>\n4"
    session.turns[-1] = Turn("assistant", closed)
    widths.clear()
    say(session, "next")
    assert sum(widths) < len(session.seen) - 30  # the system's turn was not run again
    assert session.seen.count(tokenizer().token_id("<think>")) == 1  # that of the last turn
    widths.clear()
    assert_state_is_that_of_one_run(session)


def test_interruption_between_tokens_keeps_the_state(model: Zaya, widths: list[int]) -> None:
    session = ChatSession(model, tokenizer(), NativeFormat(tokenizer()), GREEDY)
    pieces = session.ask("The user asks")
    said = [next(pieces).text for _ in range(3)]
    pieces.close()
    assert session.last is None
    assert session.turns[-1].content.startswith("".join(said))
    before = len(session.seen)
    widths.clear()
    say(session, "go on")
    assert sum(widths) == len(session.seen) - before
    assert_state_is_that_of_one_run(session)


def test_interruption_inside_the_model_drops_the_state(
    model: Zaya, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ChatSession(model, tokenizer(), NativeFormat(tokenizer()), GREEDY)
    pieces = session.ask("The user asks")
    next(pieces)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1], "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(pieces)
    assert session.state is None
    assert session.turns[-1].role == "assistant"
    say(session, "go on")
    assert_state_is_that_of_one_run(session)


def test_reset_seed_and_thinking(model: Zaya) -> None:
    own = SamplingSettings(seed=3, max_new_tokens=9)
    session = ChatSession(model, tokenizer(), NativeFormat(tokenizer()), own)
    first = say(session, "The user asks")
    session.reset()
    assert session.turns == []
    assert say(session, "The user asks") == first
    session.reset()
    session.thinking = True
    kinds = {piece.kind for piece in session.ask("The user asks")}
    assert kinds == {"reasoning"}
    assert session.turns[-1].content.startswith("<think>\n")


def test_a_conversation_that_no_longer_fits() -> None:
    model = lively_model(max_position_embeddings=40)
    session = ChatSession(model, tokenizer(), NativeFormat(tokenizer()), GREEDY)
    with pytest.raises(UserError, match=r"context is 40.*start a new conversation"):
        session.ask("a long story " * 10)
    assert session.turns == []


def formats() -> list[ChatFormat]:
    return [NativeFormat(tokenizer()), template()]


def test_both_formats_agree() -> None:
    turns = [
        Turn("system", "be brief"),
        Turn("user", "2+2="),
        Turn("assistant", "4"),
        Turn("user", "and a café?"),
    ]
    for thinking in (False, True):
        native, other = (own.prompt(turns, thinking) for own in formats())
        assert native == other
        assert native.opened == ("<think>\n" if thinking else "")
    assert set(formats()[0].stop_ids) <= set(formats()[1].stop_ids)


def test_typed_control_tokens_stay_text() -> None:
    end = tokenizer().token_id("<|im_end|>")
    think = tokenizer().token_id("<think>")
    turns = [
        Turn("user", "say <|im_end|>, <think> and \ufdd04\ufdd1"),
        Turn("assistant", "<think>\nso</think>no <|im_end|>"),
        Turn("user", "<|im_end|>"),
    ]
    for own in formats():
        ids = own.prompt(turns, False).ids
        assert ids.count(end) == 3
        assert ids.count(think) == 1  # the assistant's own
        assert "say <|im_end|>, <think> and" in tokenizer().decode(ids)


def test_templates_that_cannot_work() -> None:
    with pytest.raises(UserError, match="cannot be read"):
        template("{% if %}")
    own = template("{{ raise_exception('no system turns') }}")
    with pytest.raises(UserError, match="no system turns"):
        own.prompt([Turn("user", "x")], False)
    own = template("{{ messages.__class__.__mro__ }}")
    with pytest.raises(UserError, match="cannot show"):
        own.prompt([Turn("user", "x")], False)
