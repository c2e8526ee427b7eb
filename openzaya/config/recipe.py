"""Typed recipes: everything that decides a training run, with nothing left to the code.

A recipe is one TOML file; `config.load` reads it, applies `key=value` overrides, and returns the
objects below. The field descriptions are the reference documentation of the recipe format.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from openzaya.model.config import ModelConfig

MAX_DECAY_BFLOAT16 = 0.98
"""Largest decay of a running mean that bf16 can hold: bf16 keeps 8 bits, so steps below 1/256 are
rounded away."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TokenizerConfig(_Section):
    """Where the tokenizer comes from: a file, or trained on the recipe's own text sources."""

    path: str | None = Field(None, description="A tokenizer.json; None trains one.")
    vocab_size: int = Field(
        2048,
        gt=256,
        description="Entries of a trained byte-level BPE; the smallest there is has bytes alone.",
    )
    sample_bytes: int = Field(8_000_000, gt=0, description="Text that BPE training reads.")


class SourceConfig(_Section):
    """One source of documents."""

    kind: Literal[
        "text",
        "jsonl",
        "parquet",
        "hub",
        "bundled",
        "stdlib",
        "shards",
        "tasks",
        "chat",
    ] = Field(
        description="text: files, one document each (or split by `separator`); jsonl and parquet: "
        "one document per row; hub: Hugging Face `datasets`; bundled: text shipped with the "
        "package; stdlib: this Python's own source and documentation; shards: a folder that "
        "`openzaya data build` made, read as it is; tasks: generated arithmetic with verifiable "
        "answers; chat: jsonl or parquet rows with `messages` (and `tools`), shown as the model's "
        "own chat template shows them, always in whole documents."
    )
    path: str | None = Field(None, description="File, folder or glob; hub: the data set's name.")
    field: str = Field("text", description="Column of jsonl, parquet and hub rows.")
    split: str = Field("train", description="Split of a hub data set.")
    revision: str | None = Field(None, description="Pinned revision of a hub data set.")
    separator: str | None = Field(None, description="Cuts text files into documents.")
    style: Literal["plain", "chat"] = Field(
        "plain", description="tasks: bare worked lines, or chat with reasoning in <think>."
    )
    tasks: tuple[str, ...] = Field((), description="tasks: which kinds; empty means all.")
    turns: int = Field(
        1, ge=1, description="tasks, chat: a conversation has one to this many, equally likely."
    )
    whole: bool = Field(
        False, description="Pack whole documents only (never cut one at a window border)."
    )
    loss_on: tuple[Literal["system", "user", "assistant", "tool"], ...] = Field(
        ("assistant",), min_length=1, description="chats: roles whose tokens are learned."
    )
    heldout: float = Field(
        0.02,
        ge=0,
        lt=1,
        description="Share of documents kept for evaluation, never trained on. Shards have their "
        "own; there, 0 only turns evaluation off.",
    )
    heldout_from: Literal["documents", "end"] = Field(
        "documents",
        description="What is held out: documents, chosen by a hash; or (text, bundled) the end of "
        "every file, which is then one document, as is usual for character-level models.",
    )

    @model_validator(mode="after")
    def _check(self) -> SourceConfig:
        if self.kind not in ("stdlib", "tasks") and not self.path:
            raise ValueError(f"a source of kind {self.kind!r} needs `path`")
        if self.heldout_from == "end" and (
            self.kind not in ("text", "bundled") or self.separator or not self.heldout
        ):
            raise ValueError(
                'heldout_from = "end" takes the end of whole files: it is for sources of kind text '
                "(without separator) or bundled, with heldout above 0"
            )
        return self


class RampStage(_Section):
    """A stretch of steps with smaller batches."""

    batch_sequences: int = Field(gt=0, description="Sequences of one global batch.")
    steps: int = Field(gt=0, description="How many steps it lasts.")


class PhaseConfig(_Section):
    """One training phase: its context, data mixture and learning-rate schedule."""

    name: str
    steps: int = Field(0, ge=0, description="Optimizer steps.")
    tokens: int | None = Field(
        None,
        gt=0,
        description="Tokens of the phase, padding included, instead of steps (rounded up to them).",
    )
    context: int = Field(gt=1, description="Tokens of one sequence.")
    batch_sequences: int = Field(gt=0, description="Sequences of one global batch.")
    batch_ramp: tuple[RampStage, ...] = Field(
        (), description="Smaller batches at the beginning of the phase, one stage after another."
    )
    micro_sequences: int = Field(gt=0, description="Sequences of one forward and backward pass.")
    rope_theta: float | None = Field(
        None, gt=0, description="RoPE base, changed at the border; None takes the model's."
    )
    mixture: dict[str, float] = Field(description="Source name -> share of the tokens.")
    mixture_final: dict[str, float] | None = Field(
        None,
        description="Shares at the end of the phase; they move there evenly over its tokens.",
    )
    lr: float = Field(gt=0, description="Peak learning rate of Muon and AdamW.")
    lr_final: float = Field(ge=0, description="Learning rate at the end of the phase.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up from zero.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="From the peak to lr_final after warm-up; wsd holds the peak until the last "
        "decay_steps, which are linear.",
    )
    decay_steps: int = Field(0, ge=0, description="wsd: steps of the decay at the end.")

    @model_validator(mode="after")
    def _check(self) -> PhaseConfig:
        batches = [stage.batch_sequences for stage in self.batch_ramp] + [self.batch_sequences]
        for size in batches:
            if size % self.micro_sequences:
                raise ValueError(
                    f"phase {self.name!r}: batch_sequences ({size}) must be a multiple of "
                    f"micro_sequences ({self.micro_sequences})"
                )
        for field in ("mixture", "mixture_final"):
            shares = getattr(self, field)
            if shares is None:
                continue
            if not shares or any(w < 0 for w in shares.values()):
                raise ValueError(f"phase {self.name!r}: {field} needs shares that are not negative")
            if sum(shares.values()) <= 0:
                raise ValueError(f"phase {self.name!r}: the shares of the {field} sum to zero")
        if self.lr_final > self.lr:
            raise ValueError(f"phase {self.name!r}: lr_final is above lr")
        self._settle_steps()
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"phase {self.name!r}: warmup_steps ({self.warmup_steps}) must be below "
                f"steps ({self.steps})"
            )
        if (self.schedule == "wsd") != (self.decay_steps > 0):
            raise ValueError(f"phase {self.name!r}: decay_steps belongs to schedule wsd, and to it")
        if self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"phase {self.name!r}: warmup_steps and decay_steps are more than its {self.steps} "
                "steps"
            )
        return self

    def _settle_steps(self) -> None:
        """Steps out of a budget of tokens."""
        ramp = sum(stage.steps for stage in self.batch_ramp)
        if self.tokens is not None:
            sequences = -(-self.tokens // self.context) - self.slot(ramp)
            steps = ramp + -(-sequences // self.batch_sequences)
            if self.steps not in (0, steps):
                raise ValueError(
                    f"phase {self.name!r}: tokens = {self.tokens} are {steps} steps, but steps is "
                    f"{self.steps}: leave one of them out"
                )
            object.__setattr__(self, "steps", steps)  # frozen for everybody else
        if not self.steps:
            raise ValueError(f"phase {self.name!r}: give it steps, or tokens")
        if ramp >= self.steps:
            raise ValueError(
                f"phase {self.name!r}: batch_ramp lasts {ramp} steps; the phase has {self.steps}"
            )

    def sequences(self, step: int) -> int:
        """Sequences of the global batch of a step within the phase."""
        for stage in self.batch_ramp:
            if step < stage.steps:
                return stage.batch_sequences
            step -= stage.steps
        return self.batch_sequences

    def slot(self, step: int) -> int:
        """Sequences of all steps of the phase before one."""
        slots = 0
        for stage in self.batch_ramp:
            part = min(step, stage.steps)
            slots += part * stage.batch_sequences
            step -= part
        return slots + step * self.batch_sequences

    @property
    def total_tokens(self) -> int:
        """Tokens of all steps, padding included."""
        return self.slot(self.steps) * self.context

    @property
    def shares(self) -> dict[str, float]:
        """Every source that the phase reads, with its largest share."""
        names = {**self.mixture, **(self.mixture_final or {})}
        ends = [self.mixture, self.mixture if self.mixture_final is None else self.mixture_final]
        return {n: max(end.get(n, 0.0) / sum(end.values()) for end in ends) for n in names}


class OptimizerConfig(_Section):
    """Muon for hidden matrices, AdamW for the rest."""

    hidden: Literal["muon", "adamw"] = Field("muon", description="What updates hidden matrices.")
    momentum: float = Field(0.95, ge=0, lt=1)
    nesterov: bool = True
    newton_schulz_steps: int = Field(5, ge=1)
    newton_schulz_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    momentum_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="What Muon's momentum is kept in; bfloat16 saves 2 bytes a weight."
    )
    weight_decay: float = Field(0.1, ge=0, description="On matrices that Muon updates.")
    adamw_beta1: float = Field(0.9, ge=0, lt=1)
    adamw_beta2: float = Field(0.95, ge=0, lt=1)
    adamw_eps: float = Field(1e-8, gt=0)
    adamw_weight_decay: float = Field(0.0, ge=0)
    adamw_state_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="What AdamW's moments are kept in; bfloat16 saves 4 bytes a weight."
    )
    clip_norm: float = Field(1.0, gt=0, description="Global gradient norm is clipped to this.")

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        means = {
            "momentum": self.momentum_dtype,
            "adamw_beta1": self.adamw_state_dtype,
            "adamw_beta2": self.adamw_state_dtype,
        }
        for name, dtype in means.items():
            if dtype == "bfloat16" and getattr(self, name) > MAX_DECAY_BFLOAT16:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but a running mean kept in bfloat16 loses "
                    f"steps that small: at most {MAX_DECAY_BFLOAT16}, or keep it in float32"
                )
        return self


class AdapterConfig(_Section):
    """Train an adapter (PEFT's format, by AdamW) instead of the weights; the base stays.

    So do its balancing biases, whatever `balance` says, as an adapter cannot hold them.
    """

    kind: Literal["lora", "dora"] = Field(
        "lora", description="dora adds a magnitude per output channel; not for experts."
    )
    rank: int = Field(16, ge=1, description="Inner size of every pair of factors.")
    alpha: float = Field(32.0, gt=0, description="The change is scaled by alpha / rank.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Share of input channels that each micro-batch leaves out."
    )
    targets: tuple[str, ...] = Field(
        ("attention",),
        min_length=1,
        description="attention, experts, router, or names of matrices (o_proj.weight).",
    )
    base_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="What the frozen matrices are held in, where precision allows."
    )

    @model_validator(mode="after")
    def _check(self) -> AdapterConfig:
        if self.kind == "dora" and any("experts" in target for target in self.targets):
            raise ValueError(
                "dora has no magnitudes for experts, as no file format does: take kind = 'lora', "
                "or adapt attention and router only"
            )
        return self


class BalanceConfig(_Section):
    """Controller of the router's balancing biases."""

    enabled: bool = True
    lr: float = Field(1e-3, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    skip_share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Target load of the skip class; 0 holds its bias where it is (-1 at first).",
    )


class RunConfig(_Section):
    """Precision, checkpoints, evaluation and logging of a run."""

    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    recompute: Literal["none", "attention", "experts", "full"] = Field(
        "none",
        description="Activations that are computed again for the backward pass instead of being "
        "kept: of one kind of sub-layer, or of whole layers. Less memory, same gradients.",
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads; 0 leaves torch's choice.")
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto, cpu, cuda or cuda:N (ROCm answers to cuda too).",
    )
    checkpoint_every: int = Field(200, gt=0, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(2, gt=0, description="Newest checkpoints kept.")
    eval_every: int = Field(100, ge=0, description="Steps between held-out losses; 0 is never.")
    eval_sequences: int = Field(32, gt=0, description="Held-out sequences per source.")
    tensorboard: bool = True


class Recipe(_Section):
    """A whole training run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Names the run.")
    description: str = ""
    seed: int = Field(0, ge=0, le=2**63 - 1)
    start_from: str | None = Field(
        None,
        description="A checkpoint in any dialect to take weights and tokenizer from: a folder, a "
        "run, or a hub id with its revision. None starts from random weights.",
    )
    model: ModelConfig = Field(
        description="A preset's name, or a table with `preset` and what differs (`config.load`); "
        "what is left out is that of `start_from`."
    )
    tokenizer: TokenizerConfig = TokenizerConfig()
    sources: dict[str, SourceConfig]
    phases: tuple[PhaseConfig, ...]
    optimizer: OptimizerConfig = OptimizerConfig()
    balance: BalanceConfig = BalanceConfig()
    run: RunConfig = RunConfig()
    adapter: AdapterConfig | None = Field(
        None, description="Trains an adapter of `start_from`; None trains all weights."
    )
    token_noise: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of input tokens that training replaces by others of the same sequence; "
        "what is to be predicted stays. Against overfitting where data is short.",
    )
    neftune_alpha: float = Field(
        0.0, ge=0, description="Noise on embeddings in training (arXiv 2310.05914); 5 is usual."
    )

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if not self.phases:
            raise ValueError("a recipe needs at least one phase")
        if self.name == "cache":
            raise ValueError("the name 'cache' is taken by the folder of tokenised text")
        names = [phase.name for phase in self.phases]
        if len(set(names)) != len(names):
            raise ValueError(f"phases need different names, got {names}")
        for phase in self.phases:
            unknown = sorted(set(phase.shares) - set(self.sources))
            if unknown:
                raise ValueError(
                    f"phase {phase.name!r} mixes unknown sources {unknown}; "
                    f"the recipe defines {sorted(self.sources)}"
                )
            if phase.context > self.model.max_position_embeddings:
                raise ValueError(
                    f"phase {phase.name!r}: context {phase.context} is longer than the model's "
                    f"max_position_embeddings {self.model.max_position_embeddings}"
                )
        if self.adapter is not None:
            self._check_adapter(self.adapter)
        shards = any(source.kind == "shards" for source in self.sources.values())
        trained = self.tokenizer.path is None and self.start_from is None and not shards
        if trained and self.tokenizer.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"tokenizer.vocab_size {self.tokenizer.vocab_size} does not fit into "
                f"model.vocab_size {self.model.vocab_size}"
            )
        return self

    def _check_adapter(self, adapter: AdapterConfig) -> None:
        if self.start_from is None:
            raise ValueError("an adapter adapts a trained model: set start_from")
        changed = [p.name for p in self.phases if self.rope_theta(p) != self.model.rope_theta]
        if changed:
            raise ValueError(
                f"phase {changed[0]!r}: an adapter cannot hold another rope_theta than its base "
                f"model's {self.model.rope_theta:g}: leave rope_theta out"
            )
        if adapter.base_dtype == "bfloat16" and self.run.compute_dtype != "bfloat16":
            raise ValueError(
                "adapter.base_dtype bfloat16 would round the sum of weight and change, which "
                f"run.compute_dtype {self.run.compute_dtype} computes with: hold it in float32"
            )

    def evaluated(self, phase: PhaseConfig) -> list[str]:
        """Sources whose held-out loss is measured in a phase."""
        return [n for n, share in phase.shares.items() if share and self.sources[n].heldout]

    def rope_theta(self, phase: PhaseConfig) -> float:
        """RoPE base of a phase."""
        return self.model.rope_theta if phase.rope_theta is None else phase.rope_theta

    def max_position_embeddings(self, phase: PhaseConfig) -> int:
        """Longest context that the model is made for after a phase: what it has been trained on."""
        return phase.context if self.start_from is None else self.model.max_position_embeddings

    @property
    def total_tokens(self) -> int:
        """Tokens of all phases, padding included."""
        return sum(phase.total_tokens for phase in self.phases)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def locate(self, step: int) -> tuple[int, int]:
        """Phase index and step within that phase of global step `step` (0-based).

        Raises:
            IndexError: if the run has fewer steps.
        """
        for index, phase in enumerate(self.phases):
            if step < phase.steps:
                return index, step
            step -= phase.steps
        raise IndexError("step lies behind the last phase")
