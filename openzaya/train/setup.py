"""Everything that can go wrong is tried here, before step 1: files, sizes, tokens, room on disk."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from openzaya.checkpoint.atomic import write_bytes, write_text
from openzaya.checkpoint.companions import GENERATION, TEMPLATE, read_companions
from openzaya.checkpoint.dialects import describe_folder, read_config
from openzaya.checkpoint.load import load_model
from openzaya.checkpoint.run import find_checkpoint, list_checkpoints
from openzaya.config.load import differences, load_recipe, recipe_to_toml
from openzaya.config.recipe import Recipe
from openzaya.data.batches import DataPlan
from openzaya.data.chat import CHAT_TEMPLATE
from openzaya.data.conversations import ChatEncoder
from openzaya.data.template import read_template
from openzaya.data.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from openzaya.data.vocabulary import obtain_tokenizer
from openzaya.errors import UserError
from openzaya.kernels.native.library import why_missing
from openzaya.model.config import ModelConfig
from openzaya.model.init import init_weights
from openzaya.model.model import Zaya
from openzaya.train.chat_check import check_tool_calls
from openzaya.train.state import TrainState

LOCK = ".lock"
RECIPE = "recipe.toml"
SOURCES = "sources.json"
CARRIED = (
    TOKENIZER_CONFIG_FILE,
    TEMPLATE,
    GENERATION,
    "special_tokens_map.json",
    "added_tokens.json",
)
"""What belongs to a starting checkpoint's tokenizer: a run keeps it, and so do its checkpoints."""


@dataclass
class Run:
    """A run that is ready to train.

    Attributes:
        recipe: resolved.
        folder: where it lives.
        tokenizer: of the run.
        plan: its batches.
        state: freshly initialised.
        device: where it computes.
    """

    recipe: Recipe
    folder: Path
    tokenizer: Tokenizer
    plan: DataPlan
    state: TrainState
    device: torch.device


def open_run(recipe: Recipe, folder: Path, console: Console) -> Run:
    """Prepare the run folder and everything that the recipe names.

    Args:
        folder: exists; one that another recipe was trained in is refused.
        console: told about steps that take a while.

    Raises:
        UserError: for anything that would fail later on.
    """
    torch.manual_seed(recipe.seed)
    device = pick_device(recipe)
    _warn_of_missing_kernels(recipe, device, console)
    claimed = _claimed(recipe, folder)
    start = _start(recipe, folder, claimed, console)
    tokenizer = _tokenizer(recipe, folder, claimed, start, console)
    with console.status("reading the sources") as status:

        def progress(source: str, docs: int, tokens: int) -> None:
            status.update(f"tokenising {source}: {docs:,} documents, {tokens:,} tokens")

        chat = ChatEncoder(tokenizer, read_template(folder, tokenizer), check_tool_calls)
        plan = DataPlan(
            recipe.sources,
            recipe.phases,
            tokenizer,
            folder.parent / "cache",
            recipe.seed,
            progress,
            chat,
        )
    for (phase, name), dropped in plan.dropped.items():
        chats = recipe.sources[name].kind == "chat"
        advice = "; `openzaya data trim` shortens chats and keeps their answers" if chats else ""
        console.print(
            f"{name}: {dropped:,} documents are longer than the context of phase "
            f"{recipe.phases[phase].name} and left out{advice}",
            highlight=False,
        )
    _check_evaluation(recipe, plan)
    model = _model(recipe, folder, start)
    model.recompute = recipe.run.recompute
    state = TrainState.create(model.to(device), recipe)
    _check_room(state, recipe, folder)
    _check_sources(plan, folder, claimed)
    if not claimed:
        write_text(folder / RECIPE, recipe_to_toml(recipe))
    return Run(recipe, folder, tokenizer, plan, state, device)


def _warn_of_missing_kernels(recipe: Recipe, device: torch.device, console: Console) -> None:
    """Say once why a run in bf16 on a CPU will be slow; builds the kernels if need be."""
    if device.type != "cpu" or recipe.run.compute_dtype != "bfloat16":
        return
    with console.status("building the CPU kernels"):
        reason = why_missing()
    if reason is not None:
        console.print(
            f"training will be slow: no CPU kernels, as {reason}", highlight=False, markup=False
        )


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder; the system lifts the lock if we die.

    Raises:
        UserError: if another process has it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise UserError(
            f"the run's folder {folder} cannot be used ({error.strerror}): choose another one "
            "with --out."
        ) from error
    with lock as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is training in {folder}: wait for it, or give this run another "
                "name (name=...)."
            ) from error
        yield


def pick_device(recipe: Recipe) -> torch.device:
    """The device that a recipe names.

    Raises:
        UserError: if there is no such GPU.
    """
    name = recipe.run.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"run.device is {name!r}, but no GPU is available; use 'cpu' or 'auto'.")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"run.device is {name!r}, but there are {torch.cuda.device_count()} GPUs.")
    return device


def _claimed(recipe: Recipe, folder: Path) -> bool:
    """Whether the folder is already this recipe's; a set-up that failed does not claim it."""
    file = folder / RECIPE
    if file.is_file():
        changed = differences(load_recipe(str(file)), recipe)
        if changed:
            raise UserError(
                f"{folder} holds a run of another recipe. Give this one another name "
                f"(name=...), or remove the folder. What differs:\n  " + "\n  ".join(changed)
            )
    return file.is_file()


def architecture_of(start_from: str, folder: Path) -> ModelConfig:
    """The architecture that training from a checkpoint goes on with.

    Args:
        folder: of the run; once it has begun, the checkpoint may be gone or have changed.

    Raises:
        UserError: if there is no such checkpoint, or it cannot be read.
    """
    if (folder / RECIPE).is_file():
        began = load_recipe(str(folder / RECIPE))
        if began.start_from == start_from:
            return began.model
    config = read_config(find_checkpoint(start_from))
    return config.model_copy(update={"residual_in_fp32": True})


def _start(recipe: Recipe, folder: Path, claimed: bool, console: Console) -> Path | None:
    """The checkpoint to start from, as long as the run has nothing of its own to go on with."""
    own = claimed and list_checkpoints(folder) and (folder / TOKENIZER_FILE).is_file()
    own = own and recipe.adapter is None  # whose checkpoints do not hold the weights
    if recipe.start_from is None or own:
        return None
    start = find_checkpoint(recipe.start_from, console.print)
    _check_architecture(recipe, start)
    return start


def _check_architecture(recipe: Recipe, start: Path) -> None:
    """The recipe's model must be the checkpoint's, but for what no weight depends on."""
    free = {"rope_theta", "sliding_rope_theta", "max_position_embeddings", "residual_in_fp32"}
    free |= {"layer_types"}  # compared filled in
    theirs = read_config(start)
    if recipe.adapter is not None:  # which is used with the base as it is
        free -= {"rope_theta", "sliding_rope_theta"}
    elif "none" not in (theirs.skip_expert, recipe.model.skip_expert):
        free |= {"skip_expert"}  # identity and zero have the same tensors
    ours, given = (config.model_dump(mode="json") for config in (recipe.model, theirs))
    differ = [name for name in given if name not in free and ours[name] != given[name]]
    differ += ["layer_types"] if recipe.model.types != theirs.types else []
    if differ:
        raise UserError(
            f"the recipe's model is not that of start_from ({start}): "
            + "; ".join(f"{name} is {ours[name]!r}, not {given[name]!r}" for name in differ)
            + ". Leave `model` out to take the checkpoint's."
        )


def _model(recipe: Recipe, folder: Path, start: Path | None) -> Zaya:
    """Weights of the checkpoint to start from, or random ones."""
    compute_dtype = getattr(torch, recipe.run.compute_dtype)
    if start is not None and (recipe.adapter is not None or not list_checkpoints(folder)):
        low = recipe.adapter is not None and recipe.adapter.base_dtype == "bfloat16"
        # Of the recipe's architecture: the skip class may mean something else there.
        return load_model(
            start,
            compute_dtype,
            residual="trained",
            matrices="compute" if low else "float32",
            config=recipe.model,
        ).train()
    model = Zaya(recipe.model, compute_dtype)
    init_weights(model, recipe.seed)
    return model


def _tokenizer(
    recipe: Recipe, folder: Path, claimed: bool, start: Path | None, console: Console
) -> Tokenizer:
    """The run's tokenizer: its own copy, else the recipe's file, else the starting checkpoint's.

    Without any of them it is trained now.
    """
    own = folder / TOKENIZER_FILE
    if claimed and own.is_file():
        tokenizer = Tokenizer.load(own)
    elif start is not None and recipe.tokenizer.path is None:
        if not (start / TOKENIZER_FILE).is_file():
            raise UserError(
                f"{start} has no {TOKENIZER_FILE}: copy the one that it was trained with there, or "
                "name it in tokenizer.path."
            )
        tokenizer = Tokenizer.load(start / TOKENIZER_FILE)
        tokenizer.save(own)
        _carry(start, folder)
    else:
        _carry(None, folder)
        with console.status("obtaining the tokenizer"):
            tokenizer = obtain_tokenizer(recipe.tokenizer, recipe.sources)
        tokenizer.save(own)
        if start is not None and read_template(start, tokenizer) is not None:
            console.print(
                f"the chat template of {start} is not used, as the tokenizer is another one",
                soft_wrap=True,
                highlight=False,
            )
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} entries, but model.vocab_size is "
            f"{recipe.model.vocab_size}; make the model's at least as large."
        )
    return tokenizer


def _carry(start: Path | None, folder: Path) -> None:
    """Take over what belongs to the tokenizer; what an earlier attempt took over goes."""
    for name in CARRIED:
        (folder / name).unlink(missing_ok=True)
    if start is None:
        return
    described = describe_folder(start)
    files = read_companions(start, described).files
    if GENERATION not in files and len(described.eos) > 1:
        # The configuration of our checkpoints has the first one only.
        eos = {"eos_token_id": list(described.eos)}
        files[GENERATION] = (json.dumps(eos, indent=2) + "\n").encode()
    for name in CARRIED:
        if name in files:
            write_bytes(folder / name, files[name])


def _check_evaluation(recipe: Recipe, plan: DataPlan) -> None:
    """Every source that a phase will be evaluated on must have something held out."""
    if not recipe.run.eval_every:
        return
    for phase in recipe.phases:
        for name in recipe.evaluated(phase):
            plan.heldout(name, phase.context, 1)


def _check_sources(plan: DataPlan, folder: Path, claimed: bool) -> None:
    """The text must be what the run began with: the batch of a step is a function of it."""
    file = folder / SOURCES
    digests = {name: store.digest for name, store in plan.stores.items()}
    if not claimed or not file.is_file():
        write_text(file, json.dumps(digests, indent=1) + "\n")
        return
    try:
        began = dict(json.loads(file.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"{file} is damaged ({error}): delete it if the texts are still those that the run "
            "began with."
        ) from error
    changed = [name for name, digest in digests.items() if began.get(name) != digest]
    if changed:
        raise UserError(
            f"the text of {', '.join(changed)} is not what {folder} began with: restore it, or "
            "start a run of another name (name=...)."
        )


def _check_room(state: TrainState, recipe: Recipe, folder: Path) -> None:
    """Weights, gradients' moments and one more checkpoint than is kept must fit on the disk."""
    weights = sum(p.numel() * 4 for p in state.model.parameters() if p.requires_grad)
    there = min(len(list_checkpoints(folder)), recipe.run.keep_checkpoints)
    need = 3 * weights * (recipe.run.keep_checkpoints + 1 - there)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise UserError(
            f"{folder} has {free / 2**30:.2f} GiB free; checkpoints of this run need up to "
            f"{need / 2**30:.2f} GiB. Free some room, or lower run.keep_checkpoints."
        )


def write_tokenizer_files(tokenizer: Tokenizer, folder: Path, run: Path) -> None:
    """What `transformers.AutoTokenizer` needs beside the weights, chat template included.

    Args:
        folder: where to write it.
        run: the run's folder; the template that it took over goes along, else it is ours.
    """
    tokenizer.save(folder / TOKENIZER_FILE)
    for name in CARRIED:
        if (run / name).is_file():
            shutil.copyfile(run / name, folder / name)
    if read_template(run, tokenizer) is not None:
        return
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "pad_token": tokenizer.decode([tokenizer.pad_id], skip_special=False),
        "eos_token": tokenizer.decode([tokenizer.eos_id], skip_special=False),
        "model_max_length": 10**30,
        "clean_up_tokenization_spaces": False,
    }
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
