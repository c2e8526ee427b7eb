"""A lively little model, its tokenizer, and their folder on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from openzaya.checkpoint.atomic import atomic_folder
from openzaya.checkpoint.save import save_model
from openzaya.data.tokenizer import Tokenizer
from openzaya.model.config import PRESETS
from openzaya.model.init import init_weights
from openzaya.model.model import Zaya

TEXTS = [
    "Once upon a time there was a naïve little fox who ate crème brûlée at the café.",
    "The user asks; the assistant answers. Two and two are four, 2+2=4.",
    "日本語のテキスト and some emoji 🦊🦊, stop words and all the rest of it.",
]


@contextmanager
def one_thread() -> Iterator[None]:
    """Models this small only lose by sharing their work, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 400)


def lively_model(seed: int = 0, **changes: Any) -> Zaya:
    """Random weights whose greedy text wanders; the head is untied, so nothing repeats itself."""
    changes = {"tie_word_embeddings": False, "vocab_size": tokenizer().vocab_size, **changes}
    model = Zaya(PRESETS["tiny"].model_copy(update=changes))
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(50)
        assert model.lm_head is not None
        head = model.lm_head.weight
        head.copy_(torch.randn(head.shape, generator=generator))
    return model.eval()


def write_checkpoint(path: Path, model: Zaya | None = None, **files: str) -> Path:
    """A model folder with manifest; `files` are further ones, by stem, as .json."""
    with atomic_folder(path) as scratch:
        save_model(model or lively_model(), scratch)
        tokenizer().save(scratch / "tokenizer.json")
        for stem, text in files.items():
            (scratch / f"{stem}.json").write_text(text)
    return path


def damage(file: Path) -> None:
    """Flip one bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@torch.no_grad()
def uncached_greedy(model: Zaya, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by running the whole text again for each of them."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.logits(model(torch.tensor([ids])).hidden[0, -1]).argmax()))
    return ids[len(prompt) :]
