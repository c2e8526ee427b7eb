import pytest
from rich.console import Console

WORDS = "the quick brown fox jumps over the lazy dog and then sleeps a while"

RECIPE = """
name = "short"

[model]
vocab_size = 300
hidden_size = 96
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 24
num_experts = 4
moe_intermediate_size = 192
router_hidden_size = 24
skip_expert = "none"
partial_rotary_factor = 1.0
rope_theta = 10_000.0
max_position_embeddings = 32
eos_token_id = 1

[tokenizer]
vocab_size = 300

[sources.a]
kind = "text"
path = "{folder}/a.txt"
separator = "\\n\\n"
heldout = 0.2

[sources.b]
kind = "text"
path = "{folder}/b.txt"
separator = "\\n\\n"
heldout = 0.2

[[phases]]
name = "text"
steps = 30
context = 32
batch_sequences = 4
micro_sequences = 2
lr = 4e-3
lr_final = 4e-4
warmup_steps = 2
mixture = {{ a = 0.5, b = 0.5 }}

[run]
compute_dtype = "float32"
threads = 1
checkpoint_every = 1000
keep_checkpoints = 1
eval_sequences = 4
tensorboard = false
"""


@pytest.fixture
def recipe_file(tmp_path):
    """A recipe of a tiny standard MoE on a few kilobytes of two texts."""
    words = WORDS.split(" ")
    for name, start in (("a", 0), ("b", 5)):
        documents = [" ".join(words[(start + i) % 9 :] * (2 + i % 3)) for i in range(60)]
        (tmp_path / f"{name}.txt").write_text("\n\n".join(documents))
    file = tmp_path / "short.toml"
    file.write_text(RECIPE.format(folder=tmp_path))
    return file


@pytest.fixture
def quiet():
    return Console(quiet=True)
