"""Token shards: how fast they are made and read, and what they ask of the storage.

    python benchmarks/data.py [--folder DIR] [--text-mb 48] [--tokens 100000000]

Tokenising: the standard library's source, over and over, in jsonl files, with 1 and 2 workers;
seconds of the whole build, its processes' start included. Reading: windows in the shuffled order of
training, out of shards of synthetic documents; cold means that the page cache was told to drop the
files. Pages are those that the kernel holds afterwards (mincore), index included, beside those of
plain `numpy.memmap` slices at the same places, which is how pre-tokenised text is usually read.
Waiting: the demo's batches beside the forward and backward passes that they are for. Everything
happens in DIR and is deleted again.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from openzaya.config.load import load_recipe
from openzaya.config.recipe import SourceConfig
from openzaya.data.batches import DataPlan
from openzaya.data.conversations import ChatEncoder
from openzaya.data.packing import stack
from openzaya.data.read_model import PUBLISHED, PUBLISHED_IOPS, ReadModel
from openzaya.data.readers import WindowReader
from openzaya.data.shard_build import build_shards
from openzaya.data.shard_writer import ShardWriter
from openzaya.data.shards import FileRecord, Manifest, Side, open_side
from openzaya.data.sources import documents
from openzaya.data.tokenizer import Tokenizer
from openzaya.data.vocabulary import obtain_tokenizer
from openzaya.model.init import init_weights
from openzaya.model.model import Zaya

CONTEXTS = (512, 4096, 32768)
PAGE = mmap.PAGESIZE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where there is room, on a disk")
    parser.add_argument("--text-mb", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    args = parser.parse_args()
    console = Console(width=78, highlight=False)
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        per_token = tokenise(Path(scratch), args.text_mb, console)
        sigmas = read(Path(scratch), args.tokens, console)
        storage(sigmas, per_token, console)
        waiting(Path(scratch), console)


def tokenise(scratch: Path, megabytes: int, console: Console) -> float:
    """Prints the speed of building, and returns bytes of text a token."""
    texts = list(documents(SourceConfig(kind="stdlib"), "library"))
    tokenizer = Tokenizer.train(texts[:300], 32_000)
    corpus = scratch / "corpus"
    corpus.mkdir()
    written = number = 0
    while written < megabytes * 10**6:
        with (corpus / f"{number}.jsonl").open("w") as file:
            for text in texts:
                written += file.write(json.dumps({"text": text}) + "\n")
        number += 1
    source = SourceConfig(kind="jsonl", path=str(corpus))
    table = Table("workers", "s", "MB/s of text", "tokens/s", title="tokenising")
    for workers in (1, 2):
        began = time.perf_counter()
        out = scratch / f"built-{workers}"
        manifest = build_shards(out, source, "library", ChatEncoder(tokenizer), 1 << 22, workers)
        seconds = time.perf_counter() - began
        tokens = manifest.tokens("train") + manifest.tokens("heldout")
        rate = manifest.text_bytes / seconds / 1e6
        table.add_row(str(workers), f"{seconds:.1f}", f"{rate:.2f}", f"{tokens / seconds:,.0f}")
    console.print(table)
    per_token = manifest.text_bytes / tokens
    console.print(f"{tokens:,} tokens, {per_token:.2f} bytes of text each, 2 on the disk\n")
    return per_token


def synthetic(folder: Path, tokens: int, dtype: type[np.unsignedinteger]) -> Manifest:
    """Shards of random documents, 20 to 4,000 tokens long, half of them below 280."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    shards, done = [], 0
    with ShardWriter(folder, tokens // 4, masked=False) as writer:
        while done < tokens:
            ids = rng.integers(0, 50_000, int(20 * 200 ** rng.random()), np.uint32).astype(dtype)
            if writer.full(len(ids)):
                shards.append(writer.finish())
            writer.add("train", ids, 0)
            done += len(ids)
        shards.append(writer.finish())
    record = FileRecord(0, "", "")
    name = np.dtype(dtype).name
    return Manifest(name, "", record, 50_000, {}, 0.0, tokens // 4, False, shards)


def drop(folder: Path) -> None:
    """Asks the kernel to forget the pages of all files."""
    gc.collect()  # pages that are still mapped would stay
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def held(folder: Path, suffix: str) -> int:
    """Pages of files that the kernel holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for path in folder.glob(f"*{suffix}"):
        size = path.stat().st_size
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as content:
            view = np.frombuffer(content, np.uint8)
            pages = (ctypes.c_ubyte * -(-size // PAGE))()
            if libc.mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), pages):
                raise OSError(ctypes.get_errno(), "mincore")
            del view
            total += int((np.frombuffer(pages, np.uint8) & 1).sum())
    return total


def read(scratch: Path, tokens: int, console: Console) -> dict[int, dict[int, float]]:
    """Prints pages and speed, and returns sigma by bytes of a token and context."""
    sigmas: dict[int, dict[int, float]] = {}
    for dtype in (np.uint16, np.uint32):
        folder = scratch / np.dtype(dtype).name
        manifest = synthetic(folder, tokens, dtype)
        os.sync()
        size = np.dtype(dtype).itemsize
        title = f"windows of {tokens / 1e6:.0f} M tokens in {len(manifest.shards)} shards"
        table = Table(title=f"{title}, {np.dtype(dtype).name}")
        for column in ("context", "rows", "pages", "index", "sigma", "model", "memmap"):
            table.add_column(column, justify="right")
        for column in ("cold", "warm"):
            table.add_column(column, justify="right")
        for context in CONTEXTS:
            rows = min(400, tokens // context // 20)
            ideal = rows * (context + 1) * size / PAGE
            drop(folder)
            before = held(folder, "")
            cold = load(WindowReader(open_side(folder, manifest, "train"), context, "x", 0), rows)
            pages, index = held(folder, ".tokens"), held(folder, ".offsets")
            warm = load(WindowReader(open_side(folder, manifest, "train"), context, "x", 0), rows)
            drop(folder)
            plain_before = held(folder, ".tokens")
            for start in places(open_side(folder, manifest, "train"), context, rows):
                plain(folder, manifest, start, context)
            memmap = (held(folder, ".tokens") - plain_before) / ideal
            sigma = (pages + index - before) / ideal
            sigmas.setdefault(size, {})[context] = sigma
            expected = ReadModel(rows, context, size).sigma(1.0)
            table.add_row(
                f"{context:,}",
                str(rows),
                f"{pages:,}",
                str(index),
                f"{sigma:.2f}",
                f"{expected:.2f}",
                f"{memmap:.1f}",
                f"{cold / 1e6:.2f}",
                f"{warm / 1e6:.1f}",
            )
        console.print(table)
    console.print("pages, index: read, of tokens and offsets; sigma: both a page of useful bytes")
    console.print("model: 1 + m/(sb/P) with m = 1; memmap: sigma of numpy.memmap, without index")
    console.print("cold, warm: M tokens/s\n")
    return sigmas


def load(reader: WindowReader, rows: int) -> float:
    """Tokens a second, in batches of 8 rows."""
    began = time.perf_counter()
    count = 0
    for first in range(0, rows, 8):
        batch = stack([reader.row(k) for k in range(first, min(first + 8, rows))])
        count += batch.tokens.numel()
    return count / (time.perf_counter() - began)


def places(side: Side, context: int, rows: int) -> Iterator[int]:
    """Where the windows of the first rows start."""
    found: list[int] = []

    class Noting(WindowReader):
        def at(self, start: int):
            found.append(start)

    reader = Noting(side, context, "x", 0)
    for k in range(rows):
        reader.row(k)
    return iter(found)


def plain(folder: Path, manifest: Manifest, start: int, context: int) -> None:
    """Reads a window without any advice to the kernel; it ends where its shard does."""
    for number, shard in enumerate(manifest.shards):
        size = shard.parts["train"].tokens
        if start < size:
            path = folder / f"train-{number:05}.tokens"
            tokens = np.memmap(path, dtype=manifest.dtype, mode="r")
            tokens[start : start + context + 1].sum()
            return
        start -= size


def storage(sigmas: dict[int, dict[int, float]], per_token: float, console: Console) -> None:
    """Prints what the published batch asks of the storage, with sigma as measured."""
    table = Table(title="the published batch: G = 4,096 of s = 4,096, P = 4,096, t = 2.5 s")
    for column in ("b", "MiB", "pages", "sigma", "IOPS", "t_break at 70k, s", "MB/s of text"):
        table.add_column(column, justify="right")
    for size in (4, 2):
        model = ReadModel(4096, 4096, size, 4096, PUBLISHED.seconds)
        text = model.sequences * model.context * per_token / model.seconds / 1e6
        for sigma in (1.0, sigmas[size][4096]):
            table.add_row(
                str(size),
                f"{model.bytes / 2**20:.0f}",
                f"{model.pages:,.0f}",
                f"{sigma:.3f}",
                f"{model.iops(sigma):,.0f}",
                f"{model.break_seconds(sigma, PUBLISHED_IOPS):.3f}",
                f"{text:.1f}",
            )
    console.print(table)
    console.print("sigma 1 is the published figure to be multiplied, the other one is ours\n")


def waiting(scratch: Path, console: Console) -> None:
    """Prints how long a step waits for its batch, on the demo's phases."""
    recipe = load_recipe("demo")
    tokenizer = obtain_tokenizer(recipe.tokenizer, recipe.sources)
    plan = DataPlan(recipe.sources, recipe.phases, tokenizer, scratch / "cache", recipe.seed)
    model = Zaya(recipe.model)
    init_weights(model, 0)
    table = Table("phase", "batch, ms", "forward and backward, ms", "share", title="waiting")
    for index, phase in enumerate(recipe.phases):
        batches, passes = [], []
        for step in range(5):
            began = time.perf_counter()
            batch = plan.batch(index, step)
            batches.append(time.perf_counter() - began)
            if step in (1, 2):
                began = time.perf_counter()
                out = model(batch.tokens, positions=batch.positions)
                model.loss(out.hidden, batch.targets).backward()
                passes.append(time.perf_counter() - began)
        waited, computed = statistics.median(batches), min(passes)
        table.add_row(
            phase.name,
            f"{waited * 1e3:.1f}",
            f"{computed * 1e3:.0f}",
            f"{waited / (waited + computed):.1%}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
