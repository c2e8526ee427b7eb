from itertools import pairwise

import pytest

from openzaya.config.recipe import PhaseConfig
from openzaya.optim.schedule import learning_rate


def phase(**fields):
    base = {
        "name": "p",
        "steps": 100,
        "context": 8,
        "batch_sequences": 1,
        "micro_sequences": 1,
        "mixture": {"a": 1.0},
        "lr": 1.0,
        "lr_final": 0.1,
        "warmup_steps": 10,
    }
    return PhaseConfig(**{**base, **fields})


def test_warm_up_rises_evenly_to_the_peak_and_the_end_is_final():
    rates = [learning_rate(phase(), step) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[9] == pytest.approx(10 / 11)
    assert rates[10] == pytest.approx(1.0) == max(rates)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[10:]))


def test_cosine_and_linear_meet_half_way():
    for schedule in ("cosine", "linear"):
        p = phase(warmup_steps=0, steps=101, schedule=schedule)
        assert learning_rate(p, 50) == pytest.approx(0.55)
    quarter = learning_rate(phase(warmup_steps=0, steps=101), 25)
    assert quarter == pytest.approx(0.1 + 0.9 * (1 + 2**-0.5) / 2)


def test_constant_stays():
    p = phase(schedule="constant")
    assert learning_rate(p, 10) == learning_rate(p, 99) == 1.0


def test_a_phase_of_one_step_has_its_peak():
    assert learning_rate(phase(steps=1, warmup_steps=0), 0) == 1.0


def test_warm_up_stable_decay():
    p = phase(schedule="wsd", decay_steps=20)
    rates = [learning_rate(p, step) for step in range(100)]
    assert set(rates[10:80]) == {1.0}
    assert rates[79] == 1.0 > rates[80]
    assert rates[89] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[79:]))
