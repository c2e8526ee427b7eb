"""Answer-preserving trimming. Oracle: the best of all cuts, tried one character at a time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from openzaya.config.recipe import SourceConfig
from openzaya.data.chat import Message
from openzaya.data.conversations import ChatEncoder, Conversation, parse_conversation
from openzaya.data.rng import Rng
from openzaya.data.sources import Corpus
from openzaya.data.template import ChatTemplate
from openzaya.data.tokenizer import SPECIAL_TOKENS
from openzaya.data.trimming import reasoning_of, tokens_of, trim, trim_corpus
from openzaya.errors import UserError
from tests.data.test_conversations import FORGETFUL, SIMPLE

WORDS = "the king, speaks; to Rome\n\nand café naïve 日本 🙂🙂 1234 of   of x² — all'll "


def words(seed: int, number: int) -> str:
    rng = Rng("words", seed)
    pieces = WORDS.split(" ")
    return " ".join(pieces[rng.between(0, len(pieces) - 1)] for _ in range(number)).strip() or "so"


def talk(seed: int, turns: int = 1, thought: int = 30, inside: bool = False) -> Conversation:
    messages: list[Message] = [{"role": "system", "content": "Be brief."}]
    for turn in range(turns):
        reasoning, answer = words(seed + turn, thought), f"Answer {turn}: {words(-seed - turn, 4)}"
        messages.append({"role": "user", "content": f"Question {turn}?"})
        if inside:
            content = f"<think>\n{reasoning}\n</think>\n{answer}"
            messages.append({"role": "assistant", "content": content})
        else:
            own: Message = {"role": "assistant", "content": answer, "reasoning_content": reasoning}
            messages.append(own)
    return Conversation(messages)


def answers(conversation: Conversation) -> list[str]:
    return [
        turn["content"].rpartition("</think>")[2].strip()
        for turn in conversation.messages
        if turn["role"] == "assistant"
    ]


@pytest.fixture(scope="module", params=["own", "simple", "forgetful"])
def chat(request: pytest.FixtureRequest, tokenizer: Any) -> ChatEncoder:
    if request.param == "own":
        return ChatEncoder(tokenizer)
    source = SIMPLE if request.param == "simple" else FORGETFUL
    return ChatEncoder(
        tokenizer, ChatTemplate(tokenizer, source, SPECIAL_TOKENS, {"bos_token": "<bos>"})
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_last_reasoning_is_cut_to_the_token(chat, seed):
    whole = talk(seed, inside=chat.template is not None)
    full = reasoning_of(whole.messages[-1])
    length = tokens_of(whole, chat)
    assert trim(whole, chat, length).conversation is whole
    for context in range(length - 1, length - 50, -3):
        trimmed = trim(whole, chat, context)
        assert trimmed.conversation is not None
        kept = reasoning_of(trimmed.conversation.messages[-1])
        assert full.startswith(kept)
        assert len(kept) < len(full)
        assert answers(trimmed.conversation) == answers(whole)
        assert trimmed.conversation.messages[:-1] == whole.messages[:-1]
        assert trimmed.after == tokens_of(trimmed.conversation, chat)
        assert (trimmed.before, trimmed.cut, trimmed.earlier) == (length, True, False)
        # No other cut would have come nearer.
        reachable = set()
        for n in range(1, len(full)):
            reachable.add(tokens_of(_shortened(whole, full[:n]), chat))
        assert trimmed.after == max(n for n in reachable if n <= context)


def _shortened(conversation: Conversation, reasoning: str) -> Conversation:
    *first, last = conversation.messages
    full = reasoning_of(last)
    if "reasoning_content" in last:
        changed: Message = {**last, "reasoning_content": reasoning}
    else:
        changed = {**last, "content": last["content"].replace(full, reasoning, 1)}
    return Conversation([*first, changed])


def test_english_meets_nearly_every_context_exactly(tokenizer, play):
    """No cut ends inside a character of several tokens, but English has none."""
    chat = ChatEncoder(tokenizer)
    whole = talk(0)
    exact = 0
    for seed in range(40):
        long = _shortened(whole, play[1000 * seed : 1000 * seed + 900])
        context = tokens_of(long, chat) - 7 - 5 * seed
        exact += trim(long, chat, context).after == context
    assert exact >= 39


def test_reasoning_that_must_go_takes_its_marks_along(byte_tokenizer):
    chat = ChatEncoder(byte_tokenizer)
    for inside in (False, True):
        whole = _shortened(talk(0, inside=inside), "one two three")
        bare = Conversation([*whole.messages[:-1], {"role": "assistant", "content": "A"}])
        bare.messages[-1]["content"] = answers(whole)[0]
        least = tokens_of(bare, chat)
        trimmed = trim(whole, chat, least)
        assert trimmed.conversation == bare
        assert trimmed.after == least
        # <think>, two line ends and </think> and one more are 5 tokens: a thought needs a sixth.
        assert trim(whole, chat, least + 5).conversation == bare
        one = trim(whole, chat, least + 6)
        assert one.conversation is not None
        assert len(reasoning_of(one.conversation.messages[-1])) == 1
        assert trim(whole, chat, least - 1).conversation is None


def test_earlier_reasoning_goes_only_when_the_last_is_not_enough(byte_tokenizer):
    chat = ChatEncoder(byte_tokenizer)
    whole = talk(3, turns=3, thought=20)
    sizes = [len(reasoning_of(turn).encode()) + 5 for turn in whole.messages[2::2]]
    length = tokens_of(whole, chat)

    last = trim(whole, chat, length - sizes[2])
    assert (last.earlier, last.cut) == (False, True)
    assert [bool(reasoning_of(t)) for t in last.conversation.messages[2::2]] == [True, True, False]

    # One token less: all earlier reasoning goes at once, and now the last one's fits again.
    more = trim(whole, chat, length - sizes[2] - 1)
    kept = [reasoning_of(turn) for turn in more.conversation.messages[2::2]]
    assert kept == ["", "", reasoning_of(whole.messages[-1])[: len(kept[2])]]
    assert more.earlier
    assert more.after <= length - sizes[2] - 1
    assert answers(more.conversation) == answers(whole)

    least = length - sum(sizes)
    both = trim(whole, chat, least + 6)
    assert (both.earlier, both.cut, both.after) == (True, True, least + 6)
    assert trim(whole, chat, least).after == least
    assert trim(whole, chat, least - 1).conversation is None


def test_without_reasoning_there_is_nothing_to_cut(byte_tokenizer):
    chat = ChatEncoder(byte_tokenizer)
    plain = Conversation([{"role": "user", "content": "a" * 50}])
    assert trim(plain, chat, 10).conversation is None
    answered = Conversation([*plain.messages, {"role": "assistant", "content": "b" * 50}])
    assert trim(answered, chat, 100).conversation is None
    assert trim(answered, chat, 1000).conversation is answered


def test_calls_of_tools_are_answers_too(byte_tokenizer):
    chat = ChatEncoder(byte_tokenizer)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[Message] = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "reasoning_content": "r" * 60, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2", "reasoning_content": "s" * 10},
    ]
    trimmed = trim(Conversation(messages), chat, 170)
    assert trimmed.earlier
    assert trimmed.conversation.messages[1]["tool_calls"] == [call]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_a_corpus_is_trimmed_for_every_stage(tokenizer, tmp_path):
    chat = ChatEncoder(tokenizer)
    rows: list[dict[str, Any]] = []
    for seed in range(30):
        whole = talk(seed, turns=1 + seed % 3, thought=4 + 3 * seed, inside=seed % 2 == 1)
        messages: Any = [{**turn, "weight": 1} for turn in whole.messages]
        rows.append({"id": seed, "messages": json.dumps(messages) if seed % 5 == 0 else messages})
    rows[6]["messages"][-1]["reasoning"] = rows[6]["messages"][-1].pop("reasoning_content")
    rows[8]["messages"][-1]["content"] = [
        {"type": "text", "text": "in "},
        {"type": "text", "text": "parts \ud800"},
    ]
    write(tmp_path / "chats.jsonl", rows)
    corpus = Corpus(SourceConfig(kind="chat", path=str(tmp_path / "chats.jsonl")), "chat")
    (tmp_path / "out").mkdir()
    seen: list[int] = []
    contexts = (60, 200, 100_000)
    counts = trim_corpus(corpus, chat, contexts, tmp_path / "out", progress=seen.append)
    assert sum(seen) == (tmp_path / "chats.jsonl").stat().st_size
    untouched = [json.loads(x) for x in (tmp_path / "out/100000.jsonl").read_text().splitlines()]
    assert untouched == rows
    assert counts[2].whole == 30
    assert 0 < counts[0].dropped < 30
    assert counts[1].cut > 0 < counts[1].earlier
    for count in counts:
        assert count.whole + count.cut + count.earlier + count.dropped == 30
        made = (tmp_path / f"out/{count.context}.jsonl").read_text(encoding="utf-8").splitlines()
        back = [json.loads(line) for line in made]
        order = [row["id"] for row in back]
        assert order == sorted(order)
        assert len(order) == 30 - count.dropped
        assert count.tokens_before == counts[0].tokens_before
        total = 0
        for row in back:
            source = rows[row["id"]]
            old, new = (parse_conversation(r, "here") for r in (source, row))
            assert isinstance(row["messages"], str) == isinstance(source["messages"], str)
            assert answers(old) == answers(new)
            assert new == trim(old, chat, count.context).conversation
            turns = json.loads(row["messages"]) if isinstance(row["messages"], str) else None
            assert all(turn["weight"] == 1 for turn in turns or row["messages"])
            assert tokens_of(new, chat) <= count.context
            total += tokens_of(new, chat)
        assert total == count.tokens_after


def test_processes_write_what_one_writes(tokenizer, tmp_path):
    rows = [{"messages": talk(seed, thought=seed).messages} for seed in range(20)]
    for name in ("a", "b", "one", "two"):
        (tmp_path / name).mkdir()
    for number in range(2050):  # units hold 1,024 files at most
        write(tmp_path / "a" / f"{number:04}.jsonl", [rows[number % 20]])
    corpus = Corpus(SourceConfig(kind="chat", path=str(tmp_path / "a")), "chat")
    chat = ChatEncoder(tokenizer)
    one = trim_corpus(corpus, chat, [40], tmp_path / "one")
    two = trim_corpus(corpus, chat, [40], tmp_path / "two", workers=2)
    assert one == two
    assert (tmp_path / "one/40.jsonl").read_bytes() == (tmp_path / "two/40.jsonl").read_bytes()


def test_a_malformed_row_is_named(tokenizer, tmp_path):
    path = tmp_path / "chats.jsonl"
    write(path, [{"messages": talk(0).messages}, {"messages": [{"content": "x"}]}])
    corpus = Corpus(SourceConfig(kind="chat", path=str(path)), "chat")
    with pytest.raises(UserError, match=r"chats\.jsonl:2: message 1: every message must be"):
        trim_corpus(corpus, ChatEncoder(tokenizer), [50], tmp_path)
    path.write_text("\n")
    with pytest.raises(UserError, match="holds no conversation"):
        trim_corpus(corpus, ChatEncoder(tokenizer), [50], tmp_path)
