"""A full-size ZAYA1-8B checkpoint through C -> B -> C, beside the disk's own copy of it.

    python benchmarks/formats.py --folder DIR     (needs 36 GB there; everything is deleted again)
    python benchmarks/formats.py --folder DIR --preset tiny

Weights are random and made on the spot. Each step runs in a process of its own, from cold file
caches where the system lets us clear them, and is counted until its data is on the disk. Last, the
result is opened and continues a prompt.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from openzaya.checkpoint.dialects import write_config
from openzaya.checkpoint.headers import write_header
from openzaya.checkpoint.manifest import read_manifest
from openzaya.checkpoint.tensors import Entry, entries, parameter_count
from openzaya.checkpoint.weights import CONFIG, WEIGHTS
from openzaya.config.recipe import SourceConfig
from openzaya.data.sources import documents
from openzaya.data.tokenizer import TOKENIZER_FILE, Tokenizer
from openzaya.model.config import PRESETS, ModelConfig

_BLOCK = 1 << 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where there is room")
    parser.add_argument("--preset", default="zaya1-8b", choices=PRESETS)
    args = parser.parse_args()
    work = args.folder / "formats-benchmark"
    work.mkdir(parents=True)
    try:
        _run(work, PRESETS[args.preset])
    finally:
        shutil.rmtree(work)


def _run(work: Path, config: ModelConfig) -> None:
    source, legacy, again, copy = (work / name for name in ("C", "B", "C-again", "copy"))
    rows = []
    began = time.monotonic()
    digest = make(source, config)
    size = (source / WEIGHTS).stat().st_size
    rows.append(("make it", time.monotonic() - began, 0))
    copied = [sys.executable, "-c", _COPY, str(source / WEIGHTS), str(copy)]
    rows.append(("copy the file", *_timed(copied)))
    copy.unlink()
    verb = [sys.executable, "-m", "openzaya.cli.main"]
    rows.append(
        ("convert C -> B", *_timed([*verb, "convert", str(source), str(legacy), "--to", "B"]))
    )
    both = [*verb, "verify", str(source), str(legacy)]
    rows.append(("verify C against B, with fp32 logits", *_timed(both)))
    shutil.rmtree(source)
    back = [*verb, "convert", str(legacy), str(again), "--to", "C", "--shard-size", "100GB"]
    rows.append(("convert B -> C", *_timed(back)))
    shutil.rmtree(legacy)
    files = read_manifest(again)
    assert files is not None
    same = files[WEIGHTS].sha256 == digest
    prompt = [*verb, "generate", str(again), "Once", "--max-tokens", "4", "--dtype", "bfloat16"]
    rows.append(("open, generate 4 tokens", *_timed([*prompt, "--json"])))

    table = Table(title=f"{parameter_count(config) / 1e9:.3f} B parameters, {size / 1e9:.2f} GB")
    for column in ("step", "s", "GB/s", "peak memory, GiB"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for name, seconds, peak in rows:
        rate = f"{size / seconds / 1e9:.2f}"
        table.add_row(name, f"{seconds:.1f}", rate, f"{peak / 2**20:.2f}" if peak else "-")
    Console(width=78).print(table)
    print("C -> B -> C is bit-identical" if same else "C -> B -> C DIFFERS")
    if not same:
        sys.exit(1)


_COPY = """
import os, shutil, sys
shutil.copyfile(sys.argv[1], sys.argv[2])
os.fsync(os.open(sys.argv[2], os.O_RDONLY))
"""


def _timed(command: list[str]) -> tuple[float, int]:
    """Seconds and peak resident KiB of a process."""
    os.sync()
    cleared = Path("/proc/sys/vm/drop_caches")
    if os.access(cleared, os.W_OK):
        cleared.write_text("3")
    began = time.monotonic()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    return time.monotonic() - began, usage.ru_maxrss


def make(folder: Path, config: ModelConfig) -> str:
    """Write a native bf16 checkpoint of random weights; returns the SHA-256 of its weights."""
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(write_config(config, "C", "bfloat16")))
    texts = documents(SourceConfig(kind="bundled", path="tinyshakespeare.txt"), "plays")
    Tokenizer.train(texts, min(config.vocab_size, 2048)).save(folder / TOKENIZER_FILE)
    found = entries(config)
    stored = {e.native: ("F32" if e.is_biases else "BF16", e.shape) for e in found}
    header, _ = write_header(stored)
    rng = np.random.default_rng(0)
    digest = hashlib.sha256(header)
    with (folder / WEIGHTS).open("wb") as file:
        file.write(header)
        for entry in found:
            for block in _values(entry, rng):
                digest.update(block.data)
                file.write(block.data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _values(entry: Entry, rng: np.random.Generator):
    """Random signs and fractions; of size 1 to 2 where 1 is usual, else about a hundredth."""
    if entry.is_biases:  # of the skip class -1, as published
        biases = np.zeros(entry.numel, np.float32)
        biases[-1] = -1
        yield biases.view(np.uint8)
        return
    near_one = "norm" in entry.native or entry.native.endswith("scale")
    keep, exponent = (0x007F, 0x3F80) if near_one else (0x807F, 0x3C00)
    left = entry.numel
    while left:
        count = min(left, _BLOCK)
        bits = rng.integers(0, 2**16, count, np.uint16)
        yield ((bits & np.uint16(keep)) | np.uint16(exponent)).view(np.uint8)
        left -= count


if __name__ == "__main__":
    main()
