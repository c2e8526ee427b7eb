"""Put held-out problems to a model, and mark its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openzaya.data.chat import encode_chat
from openzaya.data.tasks import Task
from openzaya.data.tokenizer import IM_END, THINK, Tokenizer
from openzaya.evals.arithmetic import Score, score
from openzaya.model.model import Zaya
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
    end_of_turn = tokenizer.token_id(IM_END)
    stops = [*stop_token_ids(model, tokenizer)] + ([] if end_of_turn is None else [end_of_turn])
    for start in range(0, len(posed), BATCH):
        prompts = [
            encode_chat(
                [{"role": "user", "content": task.question}],
                tokenizer,
                add_generation_prompt=True,
                thinking=True,
            )[0]
            for task in posed[start : start + BATCH]
        ]
        completions = generate(model, tokenizer, prompts, settings, stop_ids=stops)
        replies += [f"{THINK}\n{completion.text}" for completion in completions]
        if progress is not None:
            progress(len(replies))
    return score(posed, replies), replies
