from openzaya.config.load import load_recipe
from openzaya.demo.plan import fitted, scaled


def test_scaling_keeps_the_ratios_of_the_phases():
    recipe = load_recipe("demo")
    for total in (60, 600, 6000):
        plan = scaled(recipe, total)
        assert abs(plan.total_steps - total) <= len(plan.phases)
        for before, after in zip(recipe.phases, plan.phases, strict=True):
            share = before.steps / recipe.total_steps
            assert abs(after.steps / plan.total_steps - share) < 0.03
            assert after.warmup_steps < after.steps


def test_even_the_shortest_plan_is_a_valid_recipe():
    plan = scaled(load_recipe("demo"), 1)
    assert [phase.steps for phase in plan.phases] == [2, 2, 2]
    assert type(plan).model_validate(plan.model_dump()) == plan


def test_fitted_fills_the_time():
    recipe = load_recipe("demo")
    plan = fitted(recipe, seconds=100.0, rate=50_000.0)
    tokens = plan.total_tokens
    assert 0.95 < tokens / (100.0 * 50_000.0) < 1.05
