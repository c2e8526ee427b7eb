"""Text to ids and back: a byte-level BPE, trained here or read from any tokenizer.json.

Untrusted text must never turn into control tokens: a user who types `<|im_end|>` means nine
characters, not the end of a turn. So `encode` reads special tokens only where it is told to.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from openzaya.errors import UserError

TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
SPECIAL_TOKENS = (PAD, EOS, BOS, IM_START, IM_END, THINK, END_THINK)  # ids 0 to 6
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256

_EOS_NAMES = (EOS, "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos_token>", IM_END)
_BOS_NAMES = (BOS, "<s>", "<|begin_of_text|>", "<|startoftext|>")
_PAD_NAMES = (PAD, "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>")


class Tokenizer:
    """A `tokenizers.Tokenizer` in two readings: with special tokens, and with none."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._json = inner.to_str()
        content = json.loads(self._json)
        self.digest = hashlib.sha256(
            json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()
        self._special = inner
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(_all_marked_special(content)))
        self._plain.encode_special_tokens = True  # that is: spell them out as ordinary text
        self.vocab_size = inner.get_vocab_size(with_added_tokens=True)
        self.eos_id = self._first(_EOS_NAMES, "an end-of-text token")
        # A tokenizer without its own start or padding token gets by with the end of text:
        # padding is never a target, and a border is a border.
        self.bos_id = self._first(_BOS_NAMES, fallback=self.eos_id)
        self.pad_id = self._first(_PAD_NAMES, fallback=self.eos_id)

    def __reduce__(self) -> tuple[Any, ...]:
        # The library forgets `encode_special_tokens` in copies and pickles: make both anew.
        return _from_json, (self._json,)

    def _first(self, names: Sequence[str], what: str = "", fallback: int | None = None) -> int:
        for name in names:
            if (found := self.token_id(name)) is not None:
                return found
        if fallback is None:
            raise UserError(
                f"the tokenizer has none of {', '.join(names)}: it needs {what}; add one of them "
                "to its added_tokens"
            )
        return fallback

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads any tokenizer.json.

        Raises:
            UserError: if the file is missing, or is no tokenizer.
        """
        try:
            return cls(tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise UserError(
                f"cannot read the tokenizer {path}: {error.strerror}: give the path of an "
                "existing tokenizer.json, or leave it out to train one"
            ) from error
        except UserError:
            raise
        except Exception as error:  # `tokenizers` raises bare Exception on malformed files
            raise UserError(
                f"{path} is no valid tokenizer.json ({error}): download or save it again"
            ) from error

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Trains a byte-level BPE with single digits and all 256 bytes.

        Raises:
            UserError: if `vocab_size` has no room for the bytes and special tokens.
        """
        if vocab_size < SMALLEST_VOCABULARY:
            raise UserError(
                f"a vocabulary of {vocab_size} is too small: {len(SPECIAL_TOKENS)} special tokens "
                f"and 256 bytes need at least {SMALLEST_VOCABULARY}"
            )
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    def save(self, path: str | Path) -> None:
        """Writes tokenizer.json; a reader sees the old file or the new one, never half of one."""
        path = Path(path)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self._special.to_str(pretty=True))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)  # mkstemp's 0600 would shut other users out
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of a text, nothing added at its ends.

        Args:
            text: Any text; lone surrogates become the replacement character.
            special: Read the names of special tokens as those tokens. Leave it False for text
                that others wrote.
        """
        inner = self._special if special else self._plain
        return list(inner.encode(_valid(text), add_special_tokens=False).ids)

    def ends(self, text: str) -> list[int]:
        """Where each token of `encode(text)` ends, in characters of the text, ascending."""
        encoding = self._plain.encode(_valid(text), add_special_tokens=False)
        return [end for _, end in encoding.offsets]

    def spelling_out(self, names: Iterable[str]) -> Tokenizer:
        """A tokenizer whose plain reading spells these added tokens out too, special or not."""
        content, wanted = json.loads(self._json), set(names)
        added = content.get("added_tokens", [])
        marked = [{**t, "special": t["special"] or t["content"] in wanted} for t in added]
        if marked == added:
            return self
        return _from_json(json.dumps({**content, "added_tokens": marked}))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts at once, on all cores."""
        encoded = self._plain.encode_batch_fast(
            [_valid(t) for t in texts], add_special_tokens=False
        )
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of the ids; bytes that are no UTF-8 come out as replacement characters."""
        return str(self._special.decode(list(ids), skip_special_tokens=skip_special))

    def token_id(self, text: str) -> int | None:
        """Id of the token that is written so, None if there is none."""
        found: int | None = self._special.token_to_id(text)
        return found


def _from_json(content: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(content))


def _valid(text: str) -> str:
    """The text without lone surrogates, which no UTF-8 can hold (JSON files may bring some)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _all_marked_special(content: dict[str, Any]) -> dict[str, Any]:
    """Marks control tokens special that a foreign file lists as ordinary added tokens."""
    control = {*SPECIAL_TOKENS, *_EOS_NAMES, *_BOS_NAMES, *_PAD_NAMES}
    added = [
        {**token, "special": token["special"] or token["content"] in control}
        for token in content.get("added_tokens", [])
    ]
    return {**content, "added_tokens": added}
