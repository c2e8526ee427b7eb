"""Headers of safetensors files: what each tensor is and which bytes are its own.

Read here, and not by the library, so that tensors can be copied as bytes and a header can be
checked whole: a size that disagrees, a gap, an overlap or a name given twice means that the file is
not what its writer meant. Layout: 8 bytes length, JSON, data.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openzaya.errors import UserError

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in headers."""

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_LONGEST = 100_000_000  # the library's own limit


@dataclass(frozen=True)
class Span:
    """A tensor in a file: `dtype` and `shape`, and bytes `begin` to `end` of the whole file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """Of one file: where data starts, the tensors in the order of their data, and metadata."""

    start: int
    spans: dict[str, Span]
    metadata: dict[str, str]


def read_header(file: Path) -> Header:
    """Parse and check the header of a safetensors file.

    Raises:
        UserError: if the file is missing, truncated, longer than its header says, or malformed.
    """

    def damaged(what: str) -> UserError:
        return UserError(
            f"{file} is damaged and cannot be opened: {what}. Copy or download it again."
        )

    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(_LONGEST, size - 8):
                raise damaged(f"its {size} bytes are too few for a header")
            content = json.loads(handle.read(length), object_pairs_hook=no_duplicates)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise damaged(f"its header is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise damaged("its header is no table of tensors")
    metadata = content.pop("__metadata__", {})
    start = 8 + length
    spans: dict[str, Span] = {}
    for name, fields in content.items():
        try:
            span = _span(fields, start)
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(f"the header's entry of tensor {name} is malformed ({error})") from error
        spans[name] = span
    ordered = dict(sorted(spans.items(), key=lambda item: (item[1].begin, item[1].end)))
    end = start
    for name, span in ordered.items():
        if span.begin != end:
            raise damaged(f"the data of tensor {name} does not follow on the one before it")
        end = span.end
    if end != size:
        what = "truncated" if end > size else "too long"
        raise damaged(f"it is {what}, with {size} bytes where its header describes {end}")
    return Header(start, ordered, metadata if isinstance(metadata, dict) else {})


def write_header(spans: dict[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Span]]:
    """Header of a file that holds these tensors (dtype, shape) in this order.

    Returns:
        Its bytes, length included, and where each tensor goes.
    """
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, tuple[int, int]] = {}
    end = 0
    for name, (dtype, shape) in spans.items():
        begin, end = end, end + math.prod(shape) * TORCH_DTYPES[dtype].itemsize
        offsets[name] = (begin, end)
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data is aligned, as the library writes it
    start = 8 + len(text)
    placed = {
        name: Span(*spans[name], start + begin, start + end)
        for name, (begin, end) in offsets.items()
    }
    return len(text).to_bytes(8, "little") + text, placed


def _span(fields: Any, start: int) -> Span:
    dtype = fields["dtype"]
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown here")
    shape = tuple(fields["shape"])
    begin, end = fields["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("sizes and offsets must be whole numbers")
    needed = math.prod(shape) * TORCH_DTYPES[dtype].itemsize
    if end - begin != needed:
        raise ValueError(f"its {end - begin} bytes are not the {needed} of {dtype} {list(shape)}")
    return Span(dtype, shape, start + begin, start + end)


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=...)`: a key that is there twice is a ValueError."""
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is in it twice")
    return content
