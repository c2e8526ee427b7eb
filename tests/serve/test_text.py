from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import decoders, models

from openzaya.data.tokenizer import Tokenizer
from openzaya.serve.text import Detokenizer, Piece, StopStrings, ThinkSplitter, possible_start
from tests.serve.helpers import TEXTS, tokenizer


def pieces_of(own: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(own, prompt or [])
    return [detokenizer.push(token) for token in ids]


@pytest.mark.parametrize(
    "text", [*TEXTS, "🦊", "plain", "日本語 ünd 🦊🦊 x", " leading", "a\n\n b"]
)
def test_pieces_join_to_the_text(text: str) -> None:
    pieces = pieces_of(tokenizer(), tokenizer().encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_every_piece_comes_as_soon_as_it_is_whole() -> None:
    own = tokenizer()
    bear = own.encode("🐻")
    pieces = pieces_of(own, [*own.encode("a"), *bear, *own.encode("c")])
    assert pieces == ["a", *[""] * (len(bear) - 1), "🐻", "c"]


def test_half_a_character_is_never_shown() -> None:
    ids = tokenizer().encode("🐻")
    assert len(ids) > 1
    assert "".join(pieces_of(tokenizer(), ids[:-1])) == ""


def test_broken_bytes_do_not_hold_the_text_up_for_ever() -> None:
    own = tokenizer()
    half = own.encode("🐻")[0]
    pieces = pieces_of(own, [half] * 40 + own.encode("then text"))
    assert "".join(pieces).endswith("then text")
    assert max(len(piece) for piece in pieces) < 60


def test_random_ids_give_what_decoding_all_at_once_gives() -> None:
    own, rng = tokenizer(), random.Random(0)
    for _ in range(30):
        ids = [rng.randrange(7, own.vocab_size) for _ in range(60)]
        whole = own.decode(ids)
        joined = "".join(pieces_of(own, ids))
        assert whole.startswith(joined)
        assert set(whole[len(joined) :]) <= {"\ufffd"}


def test_think_markers_are_spelled_out_and_other_control_tokens_are_not() -> None:
    own = tokenizer()
    ids = own.encode("<think>so</think>yes<|im_end|>", special=True)
    assert "".join(pieces_of(own, ids)) == "<think>so</think>yes"


def test_a_decoder_that_drops_leading_spaces() -> None:
    """As tokenizers made by SentencePiece have it, byte fallback included."""
    words = ["<eos>", "▁Hello", "▁world", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<eos>"))
    inner.add_special_tokens(["<eos>"])
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    own = Tokenizer(inner)
    fox = [4 + byte for byte in "🦊é".encode()]
    pieces = pieces_of(own, [2, *fox, 2], prompt=[1])
    assert "".join(pieces) == " world🦊é world"
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("text", "needles", "length"),
    [("abc", ["cd"], 1), ("abc", ["bcd", "cx"], 2), ("abc", ["abc"], 0), ("", ["x"], 0)],
)
def test_possible_start(text: str, needles: list[str], length: int) -> None:
    assert possible_start(text, needles) == length


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_stop_strings_across_any_border(size: int) -> None:
    text = "one ENE two END three"
    stop = StopStrings(["END", "never"])
    shown = ""
    for start in range(0, len(text), size):
        piece, met = stop.push(text[start : start + size])
        shown += piece
        if met:
            break
    assert shown == "one ENE two "


def test_the_earliest_stop_string_wins_and_held_text_comes_back() -> None:
    assert StopStrings(["b", "ab"]).push("xab") == ("x", True)
    stop = StopStrings(["END"])
    assert stop.push("the EN") == ("the ", False)
    assert stop.flush() == "EN"


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("opened", [True, False])
def test_reasoning_apart(size: int, opened: bool) -> None:
    text = "a < b\n</think>\nso <b> it is"
    splitter = ThinkSplitter(thinking=opened)
    if not opened:
        text = "<think>\n" + text
    pieces: list[Piece] = []
    for start in range(0, len(text), size):
        pieces += splitter.push(text[start : start + size])
    pieces += splitter.flush()
    joined = {
        kind: "".join(piece.text for piece in pieces if piece.kind == kind)
        for kind in ("reasoning", "answer")
    }
    assert joined == {"reasoning": "a < b\n", "answer": "so <b> it is"}
