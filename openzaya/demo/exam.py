"""Put held-out problems to a model, and mark its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openzaya.data.tasks import Task
from openzaya.data.tokenizer import Tokenizer
from openzaya.evals.arithmetic import Score, score
from openzaya.model.model import Zaya
from openzaya.serve.chat_format import NativeFormat, Turn
from openzaya.serve.generate import generate
from openzaya.serve.request import stop_token_ids
from openzaya.serve.sampling import SamplingSettings

BATCH = 32
"""Problems answered together."""


def take_exam(
    model: Zaya,
    tokenizer: Tokenizer,
    posed: Sequence[Task],
    max_new_tokens: int,
    progress: Callable[[int], None] | None = None,
) -> tuple[Score, list[str]]:
    """Answer every problem once, greedily, with the reasoning opened for the model.

    Args:
        posed: the problems.
        max_new_tokens: limit of each reply.
        progress: told how many are answered.

    Returns:
        The score, and the replies, each with the `<think>` that opened it.
    """
    replies: list[str] = []
    settings = SamplingSettings(temperature=0.0, max_new_tokens=max_new_tokens)
    chat = NativeFormat(tokenizer)
    stops = [*stop_token_ids(model, tokenizer), *chat.stop_ids]
    for start in range(0, len(posed), BATCH):
        prompts = [
            chat.prompt([Turn("user", task.question)], thinking=True)
            for task in posed[start : start + BATCH]
        ]
        ids = [prompt.ids for prompt in prompts]
        completions = generate(model, tokenizer, ids, settings, stop_ids=stops)
        replies += [p.opened + c.text for p, c in zip(prompts, completions, strict=True)]
        if progress is not None:
            progress(len(replies))
    return score(posed, replies), replies
