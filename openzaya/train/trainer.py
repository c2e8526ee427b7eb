"""The training loop: data -> model -> gradients -> optimizers -> balance -> checkpoint."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.text import Text

from openzaya.checkpoint.atomic import atomic_folder
from openzaya.checkpoint.run import checkpoint_path, newest_checkpoint, prune
from openzaya.config.load import recipe_to_toml
from openzaya.config.recipe import PhaseConfig, Recipe
from openzaya.data.packing import Batch
from openzaya.errors import UserError
from openzaya.kernels.allocator import reuse_freed_memory
from openzaya.optim.balance import load_entropy
from openzaya.optim.schedule import learning_rate
from openzaya.train.adapter import prove_gradients
from openzaya.train.evaluate import heldout_loss
from openzaya.train.live import LiveView
from openzaya.train.metrics import MetricsLog
from openzaya.train.noise import noisy_tokens, training_noise
from openzaya.train.setup import RECIPE, Run, exclusive, open_run, write_tokenizer_files
from openzaya.train.stop import StopRequest


def train(recipe: Recipe, out: Path, console: Console) -> Path:
    """Train a recipe to its end, or continue where an earlier start stopped.

    Args:
        recipe: what to train.
        out: folder of runs; this one lives in `out/<recipe.name>`.
        console: for the live view.

    Returns:
        Folder of the final checkpoint.

    Raises:
        UserError: for anything wrong with the recipe, files or disk.
        Stopped: after SIGTERM or Ctrl-C, with the state saved.
    """
    reuse_freed_memory()
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    with StopRequest() as stop, exclusive(out / recipe.name):
        run = open_run(recipe, out / recipe.name, console)
        found = newest_checkpoint(run.folder)
        if found is not None:
            for damaged in found.damaged:
                console.print(Text(f"skipping a damaged checkpoint: {damaged}"), soft_wrap=True)
            run.state.load(found.path)
            console.print(f"continuing after step {run.state.step} of {recipe.total_steps}")
        stop.guard()
        with (
            MetricsLog(run.folder, run.state.step, recipe.run.tensorboard) as log,
            LiveView(recipe, console, run.state.step) as view,
        ):
            return _Trainer(run, log, view, stop).run()


class _Trainer:
    """One run's loop, and what it needs at every step."""

    def __init__(self, run: Run, log: MetricsLog, view: LiveView, stop: StopRequest) -> None:
        self.recipe = run.recipe
        self.run_folder = run.folder
        self.tokenizer = run.tokenizer
        self.plan = run.plan
        self.state = run.state
        self.device = run.device
        self.log = log
        self.view = view
        self.stop = stop
        self.saved_step = run.state.step

    def run(self) -> Path:
        """Train to the end; returns the final checkpoint's folder."""
        settings = self.recipe.run
        if self.state.step and not self.log.evaluated:  # a signal cut an evaluation short
            self._evaluate_if_due()
            if self.stop.requested:
                self._leave()
        while self.state.step < self.recipe.total_steps:
            phase_index, step = self.recipe.locate(self.state.step)
            phase = self.recipe.phases[phase_index]
            self.state.model.set_context(
                self.recipe.rope_theta(phase), self.recipe.max_position_embeddings(phase)
            )
            record = self._step(phase, phase_index, step)
            if record is None:
                self._leave()
            self.log.write(record)
            self.view.step(record)
            border = step + 1 == phase.steps
            self._evaluate_if_due()
            if border or self.state.step % settings.checkpoint_every == 0:
                self._save()
            if self.stop.requested:
                self._leave()
        return checkpoint_path(self.run_folder, self.state.step)

    def _step(self, phase: PhaseConfig, phase_index: int, step: int) -> dict[str, Any] | None:
        """One optimizer step; None if a signal came before it was complete."""
        started = time.perf_counter()
        state = self.state
        batch = self.plan.batch(phase_index, step)
        lr = learning_rate(phase, step)
        for optimizer in state.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr
        result = self._gradients(batch, phase.micro_sequences)
        if result is None:
            return None
        loss, load = result
        proved = None
        if state.adapter is not None and state.step < 2:
            proved = prove_gradients(state.model, load, "b" if state.step == 0 else "a")
        parameters = list(state.model.parameters())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.recipe.optimizer.clip_norm))
        if not math.isfinite(loss) or not math.isfinite(norm):
            for optimizer in state.optimizers.values():
                optimizer.zero_grad(set_to_none=True)
            self._save()
            raise UserError(
                f"step {state.step + 1}: loss {loss} with gradient norm {norm} is not finite. The "
                f"last checkpoint is of step {self.saved_step}; lower the learning rate, or "
                "compute in float32 (run.compute_dtype)."
            )
        for optimizer in state.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state.controller.update(load)
        seconds = time.perf_counter() - started
        state.step += 1
        state.tokens += batch.real_tokens
        num_experts = state.model.config.num_experts
        skipped = load[:, num_experts:].sum(1) / load.sum(1)
        record = {
            "step": state.step,
            "phase": phase.name,
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": state.tokens,
            "step_tokens": batch.real_tokens,
            "seconds": seconds,
            "tokens_per_second": batch.real_tokens / seconds,
            "load_entropy": load_entropy(load, num_experts).tolist(),
            "skip_share": skipped.tolist(),
            "load": load.tolist(),
        }
        return record if proved is None else {**record, "adapter_gradients": proved}

    def _gradients(self, batch: Batch, micro_sequences: int) -> tuple[float, torch.Tensor] | None:
        """Gradients of the mean loss over the global batch, whatever the micro-batch size."""
        model = self.state.model
        targets = int((batch.targets >= 0).sum())
        total, load = 0.0, None
        for start in range(0, batch.tokens.shape[0], micro_sequences):
            if self.stop.requested:
                for optimizer in self.state.optimizers.values():
                    optimizer.zero_grad(set_to_none=True)
                return None
            rows = slice(start, start + micro_sequences)
            positions = batch.positions[rows].to(self.device)
            tokens = noisy_tokens(batch.tokens[rows], self.recipe, self.state.step, start)
            with training_noise(model, self.recipe, self.state.step, start, positions):
                out = model(tokens.to(self.device), positions=positions)
                loss = model.loss(out.hidden, batch.targets[rows].to(self.device)) / max(targets, 1)
                loss.backward()
            total += float(loss.detach())
            load = out.load if load is None else load + out.load
        assert load is not None
        return total, load

    def _evaluate_if_due(self) -> None:
        """Evaluate at every `eval_every`-th step and at the end of every phase."""
        index, step = self.recipe.locate(self.state.step - 1)
        phase, every = self.recipe.phases[index], self.recipe.run.eval_every
        if every and (step + 1 == phase.steps or self.state.step % every == 0):
            self._evaluate(phase)

    def _evaluate(self, phase: PhaseConfig) -> None:
        """Held-out loss of every source in the phase's mixture; given up when a signal comes."""
        losses: dict[str, float] = {}
        for source in self.recipe.evaluated(phase):
            batch = self.plan.heldout(source, phase.context, self.recipe.run.eval_sequences)
            loss = heldout_loss(self.state.model, batch, phase.micro_sequences, self.stop)
            if loss is None:
                return
            losses[source] = loss
        if losses:
            self.log.write({"step": self.state.step, "heldout": losses})
            self.view.heldout(losses)

    def _save(self) -> None:
        """Write a checkpoint of the current step, unless there is one."""
        path = checkpoint_path(self.run_folder, self.state.step)
        if self.saved_step == self.state.step and path.exists():
            return
        with atomic_folder(path) as folder:
            self.state.save(folder)
            write_tokenizer_files(self.tokenizer, folder, self.run_folder)
            (folder / RECIPE).write_text(recipe_to_toml(self.recipe))
        self.saved_step = self.state.step
        prune(self.run_folder, self.recipe.run.keep_checkpoints, path)

    def _leave(self) -> NoReturn:
        """Save, then end with the signal's exit code."""
        self._save()
        self.view.note(
            f"stopped: step {self.state.step} is saved; the same command continues from there"
        )
        self.stop.leave()
