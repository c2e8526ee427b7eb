from __future__ import annotations

from typing import Any

import pytest
import torch

from openzaya.errors import UserError
from openzaya.model.model import Zaya
from openzaya.serve.generate import generate, stream
from openzaya.serve.request import stop_token_ids
from openzaya.serve.sampling import SamplingSettings
from tests.serve.helpers import lively_model, tokenizer, uncached_greedy

GREEDY = SamplingSettings(temperature=0, max_new_tokens=20)
PROMPTS = ["Once upon a time", "The", "日本語 and emoji 🦊 and all the rest of it", "2+2=", "The"]


@pytest.fixture(scope="module")
def model() -> Zaya:
    return lively_model()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [tokenizer().encode(text) for text in PROMPTS]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ("hybrid_sliding", "hybrid"), "sliding_window": 6},
        {"attention": "standard", "router": "linear"},
        {"skip_expert": "identity", "cca_time0": 3, "cca_time1": 3},
    ],
)
def test_greedy_rows_equal_running_alone_and_uncached(
    changes: dict[str, Any], prompts: list[list[int]]
) -> None:
    model = lively_model(3, **changes)
    together = generate(model, tokenizer(), prompts, GREEDY, stop_ids=[])
    for prompt, completion in zip(prompts, together, strict=True):
        [alone] = generate(model, tokenizer(), [prompt], GREEDY, stop_ids=[])
        assert completion.ids == alone.ids == uncached_greedy(model, prompt, 20)
        assert completion.text == alone.text
        assert completion.finish_reason == "length"
        assert completion.prompt_tokens == len(prompt)
        assert completion.prefill_rate > 0
        assert completion.decode_rate > 0


def test_rows_that_end_early_leave_the_batch(
    model: Zaya, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [3, 9, 1, 6, 9]
    settings = [SamplingSettings(temperature=0, max_new_tokens=limit) for limit in limits]
    widths: list[tuple[int, int]] = []
    forward = Zaya.forward

    def watched(self: Zaya, tokens: torch.Tensor, **kwargs: Any) -> Any:
        widths.append((tokens.shape[0], tokens.shape[1]))
        return forward(self, tokens, **kwargs)

    monkeypatch.setattr(Zaya, "forward", watched)
    completions = generate(model, tokenizer(), prompts, settings, stop_ids=[])
    longest = max(map(len, prompts))
    # equal prompts are run once; then one column a step for the rows that are not done
    assert widths == [(4, longest), *[(n, 1) for n in (4, 4, 3, 3, 3, 2, 2, 2)]]
    for prompt, limit, completion in zip(prompts, limits, completions, strict=True):
        assert completion.ids == uncached_greedy(model, prompt, limit)


def test_samples_depend_on_the_own_seed_only(model: Zaya, prompts: list[list[int]]) -> None:
    settings = [
        SamplingSettings(temperature=1.5, top_k=50, seed=row, max_new_tokens=12)
        for row in range(len(prompts))
    ]
    together = generate(model, tokenizer(), prompts, settings, stop_ids=[])
    for row, prompt in enumerate(prompts):
        [alone] = generate(model, tokenizer(), [prompt], settings[row : row + 1], stop_ids=[])
        assert alone.ids == together[row].ids


def test_equal_prompts_under_one_setting_differ_and_repeat(model: Zaya) -> None:
    prompt = tokenizer().encode("The")
    own = SamplingSettings(seed=5, max_new_tokens=12)
    first = generate(model, tokenizer(), [prompt] * 3, own)
    assert len({tuple(completion.ids) for completion in first}) == 3
    again = generate(model, tokenizer(), [prompt], SamplingSettings(seed=7, max_new_tokens=12))
    assert again[0].ids == first[2].ids


def test_stop_token(model: Zaya, prompts: list[list[int]]) -> None:
    [free] = generate(model, tokenizer(), prompts[:1], GREEDY, stop_ids=[])
    end = next(token for i, token in enumerate(free.ids) if i > 3 and token not in free.ids[:i])
    at = free.ids.index(end)
    [stopped] = generate(model, tokenizer(), prompts[:1], GREEDY, stop_ids=[9999, end])
    assert stopped.finish_reason == "eos"
    assert stopped.ids == free.ids[: at + 1]
    assert free.text.startswith(stopped.text)


def test_stop_strings_are_not_shown(model: Zaya, prompts: list[list[int]]) -> None:
    [free] = generate(model, tokenizer(), prompts[:1], GREEDY, stop_ids=[])
    needle = free.text[len(free.text) // 2 :][:4]
    own = SamplingSettings(temperature=0, max_new_tokens=20, stop=("nowhere", needle))
    events = list(stream(model, tokenizer(), prompts[:1], own, stop_ids=[]))
    completion = events[-1].completion
    assert completion is not None
    assert completion.finish_reason == "stop"
    assert completion.text == free.text[: free.text.index(needle)]
    assert "".join(event.text for event in events) == completion.text
    assert [event.token for event in events] == completion.ids
    assert all(event.completion is None for event in events[:-1])


def test_a_control_token_stops_by_its_name(model: Zaya, prompts: list[list[int]]) -> None:
    end = tokenizer().token_id("<|im_end|>")
    assert end is not None
    with torch.no_grad():
        loud = lively_model()
        assert loud.lm_head is not None
        loud.lm_head.weight[end] = 0
        loud.lm_head.weight.mul_(0)  # all logits equal: greedy takes id 0
    own = SamplingSettings(temperature=0, max_new_tokens=5, stop=("<pad>",))
    [completion] = generate(loud, tokenizer(), prompts[:1], own)
    assert (completion.ids, completion.finish_reason, completion.text) == ([0], "eos", "")


def test_on_text_gives_the_texts(model: Zaya, prompts: list[list[int]]) -> None:
    texts = [""] * len(prompts)

    def collect(row: int, text: str) -> None:
        texts[row] += text

    completions = generate(model, tokenizer(), prompts, GREEDY, collect)
    assert texts == [completion.text for completion in completions]


def test_default_limit_is_cut_to_the_context() -> None:
    model = lively_model(max_position_embeddings=30)
    prompt = tokenizer().encode("The user")
    [completion] = generate(model, tokenizer(), [prompt], SamplingSettings(), stop_ids=[])
    assert len(prompt) + len(completion.ids) == 30


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([], 4, "empty"),
        ([3, 400], 4, "token id 400, outside the model's vocabulary of"),
        ([3, -1], 4, "token id -1"),
        ([9] * 20, 11, "20 tokens and asks for 11 more, 31 together.* 30: .*at most 10"),
        ([9] * 30, None, "30 tokens and leaves no room"),
        ([9] * 40, 1, "at most 0 new"),
    ],
)
def test_bad_prompts(prompt: list[int], limit: int | None, message: str) -> None:
    model = lively_model(max_position_embeddings=30)
    own = SamplingSettings(max_new_tokens=limit)
    with pytest.raises(UserError, match=message):
        stream(model, tokenizer(), [prompt], own)  # before the first token is asked for
    with pytest.raises(UserError, match=r"prompt 2 "):
        generate(model, tokenizer(), [[9], prompt], own)


def test_foreign_tokenizer() -> None:
    model = lively_model(vocab_size=300)
    with pytest.raises(UserError, match=r"tokenizer has \d+ tokens, the model only 300"):
        generate(model, tokenizer(), [[3]], GREEDY)


def test_weights_that_are_not_numbers(prompts: list[list[int]]) -> None:
    model = lively_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        generate(model, tokenizer(), prompts, GREEDY)


def test_configured_end_counts_only_if_it_is_a_control_token() -> None:
    eos = tokenizer().eos_id
    assert set(stop_token_ids(lively_model(eos_token_id=106), tokenizer())) == {eos}
    im_end = tokenizer().token_id("<|im_end|>")
    assert im_end is not None
    assert set(stop_token_ids(lively_model(eos_token_id=im_end), tokenizer())) == {eos, im_end}


def test_no_prompts(model: Zaya) -> None:
    assert generate(model, tokenizer(), [], GREEDY) == []


def test_a_growing_state_is_not_needed(model: Zaya, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for all tokens is made before the first one."""
    monkeypatch.setattr(torch.nn.functional, "pad", None)
    generate(model, tokenizer(), [tokenizer().encode("The")], GREEDY)
