import pytest

from openzaya.config.load import differences, load_recipe, recipe_to_toml
from openzaya.errors import UserError
from openzaya.model.config import PRESETS
from tests.config import golden

SMALLEST = """
name = "t"
model = "tiny"
[tokenizer]
vocab_size = 512
[sources.a]
kind = "text"
path = "x.txt"
[[phases]]
name = "one"
steps = 10
context = 16
batch_sequences = 4
micro_sequences = 2
lr = 1e-3
lr_final = 0.0
mixture = { a = 1.0 }
"""


@pytest.fixture
def recipe_file(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text(SMALLEST)
    return str(file)


@pytest.mark.parametrize("name", golden.names())
def test_resolved_recipes_equal_their_golden_files(name):
    """If a change is meant, `make golden` rewrites them."""
    assert recipe_to_toml(golden.resolved(name)) == golden.file_of(name).read_text()


@pytest.mark.parametrize("name", golden.names())
def test_a_resolved_recipe_loads_to_itself(name):
    recipe = golden.resolved(name)
    assert load_recipe(str(golden.file_of(name))) == recipe


def test_overrides_reach_every_kind_of_field(recipe_file):
    recipe = load_recipe(
        recipe_file,
        [
            "seed=7",
            "phases.one.lr=0.5",
            "phases.0.steps=20",
            "model.num_experts=6",
            "sources.a.path=other place.txt",
            "run.tensorboard=false",
            "phases.one.mixture.a=2.5",
        ],
    )
    assert recipe.seed == 7
    assert recipe.phases[0].lr == 0.5
    assert recipe.phases[0].steps == 20
    assert recipe.model.num_experts == 6
    assert recipe.model.hidden_size == PRESETS["tiny"].hidden_size
    assert recipe.sources["a"].path == "other place.txt"
    assert recipe.run.tensorboard is False
    assert recipe.phases[0].mixture == {"a": 2.5}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sed=1", "sed: unknown key .did you mean 'seed'"),
        ("phases.one.leraning=1", "phases.0.leraning: unknown key"),
        ("model.num_expert=4", "did you mean 'num_experts'"),
        ("sources.a.knd='text'", "did you mean 'kind'"),
        ("run.checkpoint_evry=4", "did you mean 'checkpoint_every'"),
        ("seed='x'", "seed: .*got 'x'"),
        ("phases.one.steps='10'", "steps: .*got '10'"),
        ("phases.one.steps=2.5", "steps: .*got 2.5"),
        ("phases.one.steps=0", "give it steps, or tokens"),
        ("phases.one.micro_sequences=3", "multiple of micro_sequences"),
        ("phases.one.mixture={b=1.0}", "unknown sources .'b'"),
        ("phases.one.mixture={a=0.0}", "sum to zero"),
        ("phases.one.warmup_steps=10", "warmup_steps"),
        ("phases.one.context=100000", "longer than the model's"),
        ("tokenizer.vocab_size=4096", "does not fit into"),
        ("model.num_key_value_heads=3", "multiple of"),
        ("model='huge'", "unknown model preset 'huge'; there are tiny"),
        ("sources.a.kind='csv'", "kind: .*got 'csv'"),
        ("phases.two.lr=1", "no entry 'two'; there are .'one'"),
        ("nonsense", "key=value"),
        ("phases.one.lr=inf", "finite"),
        ("phases.one.mixture={a=nan}", "finite"),
        ("seed=99999999999999999999999", "seed"),
        ("run.device='bogus'", "device"),
        ("run.threads=100000", "threads"),
        ("name='cache'", "is taken"),
        ("model.preset=[1]", "unknown model preset"),
        ("name.x=1", "is a value, not a table"),
    ],
)
def test_what_is_wrong_is_named(recipe_file, override, message):
    with pytest.raises(UserError, match=message):
        load_recipe(recipe_file, [override])


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(UserError, match=r"no recipe 'nowhere'.*demo"):
        load_recipe("nowhere")
    broken = tmp_path / "b.toml"
    broken.write_text("name = [")
    with pytest.raises(UserError, match=r"b\.toml is not valid TOML"):
        load_recipe(str(broken))
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(str(broken))


def test_a_missing_field_is_named(tmp_path):
    file = tmp_path / "m.toml"
    file.write_text(SMALLEST.replace("context = 16\n", ""))
    with pytest.raises(UserError, match=r"phases\.0\.context: missing"):
        load_recipe(str(file))


def test_differences_name_both_values(recipe_file):
    a, b = load_recipe(recipe_file), load_recipe(recipe_file, ["phases.one.lr=0.25"])
    assert differences(a, a) == []
    assert differences(a, b) == ["phases.0.lr: 0.001 -> 0.25"]


def test_locate_walks_through_the_phases():
    recipe = load_recipe("tiny")
    first = recipe.phases[0].steps
    assert recipe.locate(0) == (0, 0)
    assert recipe.locate(first - 1) == (0, first - 1)
    assert recipe.locate(first) == (1, 0)
    with pytest.raises(IndexError):
        recipe.locate(recipe.total_steps)
