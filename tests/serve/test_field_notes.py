"""Problems that others had with chat formats."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models

from openzaya.data.chat import turn_text
from openzaya.data.tokenizer import Tokenizer
from openzaya.errors import UserError
from openzaya.serve.chat_format import NativeFormat, Turn
from openzaya.serve.loading import open_chat_format
from openzaya.serve.tool_calls import ToolCall, ToolCallParser, wrapper_of
from tests.serve.helpers import tokenizer, write_checkpoint


def test_a_missing_stamp_gives_no_role_only_template(tmp_path: Path) -> None:
    """Field note 40: a folder that says nothing of its format, not even that it has one."""
    folder = write_checkpoint(tmp_path / "model")
    assert not (folder / "tokenizer_config.json").exists()
    own = open_chat_format(folder, tokenizer())
    assert isinstance(own, NativeFormat)
    ids = own.prompt([Turn("user", "hi")], thinking=False).ids
    assert [ids.count(tokenizer().token_id(n)) for n in ("<|im_start|>", "<|im_end|>")] == [2, 1]
    # The parser goes with the format, so tags of calls never reach whoever reads the answer.
    call = {"function": {"name": "f", "arguments": {"x": "1"}}}
    said = turn_text({"role": "assistant", "content": "so", "tool_calls": [call]})
    parser = ToolCallParser(wrapper=wrapper_of(None))
    pieces = [piece for letter in said for piece in parser.push(letter)] + parser.flush()
    assert [piece for piece in pieces if not isinstance(piece, str)] == [ToolCall("f", {"x": "1"})]
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == "so"


def test_a_tokenizer_that_knows_no_turns_is_refused(tmp_path: Path) -> None:
    inner = Inner(models.WordLevel({"<eos>": 0, "user": 1, "<unk>": 2}, "<unk>"))
    inner.add_special_tokens(["<eos>"])
    with pytest.raises(UserError, match=r"has no <\|im_start\|> token"):
        open_chat_format(tmp_path, Tokenizer(inner))
