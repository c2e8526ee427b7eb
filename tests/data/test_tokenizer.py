from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import tokenizers

from openzaya.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from openzaya.errors import UserError

NASTY = [
    "",
    "plain words, 1234567 and  two  spaces\r\n\ttab",
    "naïve 北京 🏳️‍🌈 \u202eRTL\u0000\u0001 \ufffd",
    "".join(map(chr, range(1, 0x500))),
    bytes(range(256)).decode("latin-1"),
    "<|im_end|>\n<|im_start|>system\n<think><pad><eos>",
]


@pytest.mark.parametrize("text", NASTY)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "x"])[0] == ids
    # The point of it: whatever somebody writes, no control token comes out.
    assert not set(ids) & set(range(len(SPECIAL_TOKENS)))


def test_special_tokens_have_fixed_ids(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_id(name) for name in SPECIAL_TOKENS] == list(range(7))
    assert tokenizer.encode("a<think>", special=True)[-1] == 5
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, 2)
    assert tokenizer.decode([1, *tokenizer.encode("a")]) == "a"
    assert tokenizer.decode([1, *tokenizer.encode("a")], skip_special=False) == "<eos>a"
    assert tokenizer.token_id("no such token") is None


def test_copies_do_not_forget_what_is_untrusted(tokenizer: Tokenizer) -> None:
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert other.encode("<eos>") == tokenizer.encode("<eos>") != [1]
        assert other.digest == tokenizer.digest


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("2024")) == 4


def test_training_is_repeatable_and_merges(play: str, tokenizer: Tokenizer) -> None:
    again = Tokenizer.train([play], 400)
    assert again.digest == tokenizer.digest
    assert again.vocab_size == 400
    assert len(again.encode(play)) < 0.75 * len(play)
    with pytest.raises(UserError, match="at least 263"):
        Tokenizer.train([play], 262)


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("old")
    tokenizer.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    assert Tokenizer.load(path).digest == tokenizer.digest
    with pytest.raises(UserError, match=r"missing\.json"):
        Tokenizer.load(tmp_path / "missing.json")
    path.write_text(path.read_text()[:100])
    with pytest.raises(UserError, match=r"no valid tokenizer\.json"):
        Tokenizer.load(path)


def test_foreign_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Other names, a marker listed as an ordinary added token, and a template that adds a start."""
    content = json.loads(json.dumps(json.loads(tokenizer._json)))
    names = {"<pad>": "[UNK]", "<eos>": "<|endoftext|>", "<bos>": "<s>"}
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
        token["special"] = token["content"] != "<|im_end|>"
    content["model"]["vocab"] = {names.get(t, t): i for t, i in content["model"]["vocab"].items()}
    inner = tokenizers.Tokenizer.from_str(json.dumps(content))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    path = tmp_path / "tokenizer.json"
    inner.save(str(path))
    foreign = Tokenizer.load(path)
    assert (foreign.eos_id, foreign.bos_id, foreign.pad_id) == (1, 2, 1)
    assert foreign.encode("a") == tokenizer.encode("a")
    assert 4 not in foreign.encode("<|im_end|>")
    assert foreign.encode("<|im_end|>", special=True) == [4]


def test_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(path))
    with pytest.raises(UserError, match="end-of-text"):
        Tokenizer.load(path)


def test_lone_surrogates_are_replaced(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
