from __future__ import annotations

import pytest

from openzaya.data.mixture import Mixture
from openzaya.errors import UserError


@pytest.mark.parametrize(
    "shares",
    [
        {"a": 1.0},
        {"a": 0.5, "b": 0.3, "c": 0.2},
        {"a": 0.7, "b": 0.299, "c": 0.001},
        {"a": 1 / 3, "b": 1 / 7, "c": 3.0, "d": 0.01},
    ],
)
def test_ordinals_have_no_gap_and_shares_are_exact(shares: dict[str, float]) -> None:
    mixture = Mixture(shares, 0, "phase", 0)
    slots = 3 * mixture.block + 17  # a part of a block at the end
    seen: dict[str, list[int]] = {name: [] for name in shares}
    for slot in range(slots):
        name, ordinal = mixture.assign(slot)
        seen[name].append(ordinal)
        if (slot + 1) % mixture.block == 0:  # shares are exact to one slot after whole blocks
            for other, share in shares.items():
                expected = (slot + 1) * share / sum(shares.values())
                assert abs(len(seen[other]) - expected) <= 1
    for ordinals in seen.values():
        assert ordinals == list(range(len(ordinals)))


def test_random_access() -> None:
    shares = {"a": 0.9, "b": 0.1}
    forward = [Mixture(shares, 1).assign(slot) for slot in range(0, 2000, 37)]
    one = Mixture(shares, 1)
    backward = [one.assign(slot) for slot in reversed(range(0, 2000, 37))]
    assert forward == backward[::-1]


def test_the_key_changes_the_order() -> None:
    orders = {
        "".join(Mixture({"a": 1, "b": 1}, key).assign(s)[0] for s in range(64)) for key in range(8)
    }
    assert len(orders) == 8


def test_zero_share_gets_nothing() -> None:
    mixture = Mixture({"a": 1.0, "never": 0.0, "b": 1.0}, 0)
    assert mixture.sources == ("a", "b")
    assert {mixture.assign(slot)[0] for slot in range(1000)} == {"a", "b"}


def test_tiny_and_missing_shares_are_refused() -> None:
    with pytest.raises(UserError, match=r"'b'.*below 1e-05"):
        Mixture({"a": 1.0, "b": 1e-7}, 0)
    with pytest.raises(UserError, match="sum to zero"):
        Mixture({"a": 0.0}, 0)


@pytest.mark.parametrize(
    ("shares", "final"),
    [
        ({"a": 1.0}, {"a": 0.2, "b": 0.8}),
        ({"a": 1.0, "b": 0.0}, {"b": 3.0}),
        ({"a": 0.5, "b": 0.5, "c": 0.0}, {"a": 0.2, "b": 0.0, "c": 0.001}),
        ({"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 2.0}),
    ],
)
@pytest.mark.parametrize("slots", [1, 300, 20_000])
def test_shares_that_move(shares: dict[str, float], final: dict[str, float], slots: int) -> None:
    """Oracle: the integral of the line from one share to the other."""
    mixture = Mixture(shares, 0, "phase", 0, final=final, slots=slots)
    seen: dict[str, list[int]] = {name: [] for name in {**shares, **final}}
    for slot in range(slots):
        name, ordinal = mixture.assign(slot)
        seen[name].append(ordinal)
        done = slot + 1
        if done % mixture.block == 0:
            for other, ordinals in seen.items():
                begin, end = (mix.get(other, 0.0) / sum(mix.values()) for mix in (shares, final))
                expected = begin * done + (end - begin) * done * done / slots / 2
                assert abs(len(ordinals) - expected) <= len(seen), (slot, other)
    for ordinals in seen.values():
        assert ordinals == list(range(len(ordinals)))
    again = Mixture(shares, 0, "phase", 0, final=final, slots=slots)
    middle = slots // 2
    assert again.assign(middle) == Mixture(shares, 0, "phase", 0, final=final, slots=slots).assign(
        middle
    )


def test_a_curriculum_of_trillions_of_tokens_is_settled_at_once() -> None:
    mixture = Mixture({"a": 1.0}, 0, final={"b": 1.0}, slots=2_000_000_000)
    counts = mixture._owned(-(-2_000_000_000 // mixture.block))
    assert counts[0] == pytest.approx(counts[1], rel=1e-3)
    assert mixture.assign(0)[0] == "a"
    assert mixture.assign(1_999_999_999)[0] == "b"
