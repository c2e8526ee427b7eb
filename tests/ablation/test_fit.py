import math

import pytest

from openzaya.ablation.fit import NEAR, fit_power_law
from openzaya.errors import UserError


def test_a_known_law_is_recovered():
    xs = [1e12, 3e12, 2e13]
    law = fit_power_law(xs, [37.0 * x**-0.08 for x in xs])
    assert law.b == pytest.approx(37.0)
    assert law.c == pytest.approx(0.08)
    assert law.error == pytest.approx(0, abs=1e-12)
    assert law(5e12) == pytest.approx(37.0 * 5e12**-0.08)
    assert (law.low, law.high) == (1e12, 2e13)


def test_noise_that_is_symmetric_cancels():
    """Two seeds around a law, as far above as below in logarithms, give that law."""
    xs = [1e12, 1e12, 4e12, 4e12, 1.6e13, 1.6e13]
    noise = [math.exp(0.02 * (-1) ** i) for i in range(6)]
    law = fit_power_law(xs, [20.0 * x**-0.05 * n for x, n in zip(xs, noise, strict=True)])
    assert law.b == pytest.approx(20.0)
    assert law.c == pytest.approx(0.05)
    assert law.error == pytest.approx(0.02, rel=0.02)


def test_it_is_the_least_squares_fit():
    xs, losses = [1.0, 2.0, 7.0], [5.0, 4.5, 3.0]

    def squares(b, c):
        return sum(
            (math.log(y) - math.log(b * x**-c)) ** 2 for x, y in zip(xs, losses, strict=True)
        )

    law = fit_power_law(xs, losses)
    best = squares(law.b, law.c)
    for factor in (0.99, 1.01):
        assert squares(law.b * factor, law.c) > best
        assert squares(law.b, law.c * factor) > best


def test_the_inverse_is_asked_near_the_measured_range_only():
    xs = [1e12, 1e13]
    law = fit_power_law(xs, [10.0 * x**-0.1 for x in xs])
    assert law.inverse(law(3e12)) == pytest.approx(3e12)
    assert law.inverse(law(1e13 * NEAR * 0.99)) == pytest.approx(1e13 * NEAR * 0.99)
    assert law.inverse(law(1e13 * NEAR * 1.01)) is None
    assert law.inverse(law(1e12 / NEAR * 0.99)) is None


def test_a_loss_that_rises_says_nothing_about_equal_loss():
    assert fit_power_law([1e12, 1e13], [4.0, 4.1]).inverse(4.05) is None
    assert fit_power_law([1e12, 1e13], [4.0, 4.0]).inverse(4.0) is None


@pytest.mark.parametrize(
    ("xs", "losses"), [([1.0, 1.0], [2.0, 3.0]), ([0.0, 1.0], [2.0, 3.0]), ([1.0, 2.0], [0.0, 3.0])]
)
def test_what_has_no_law_is_refused(xs, losses):
    with pytest.raises(UserError):
        fit_power_law(xs, losses)
