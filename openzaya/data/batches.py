"""The data of a whole run as one pure function: (recipe, seed, step) -> batch.

Slot s of a phase (the sequences of all steps before, plus the row) belongs to a source and has an
ordinal k within it (`mixture.py`); row k of that source is computed (`readers.py`). Nothing is
remembered between calls, so a resumed run, or one on other ranks, sees the same rows in the same
places. All orders are keyed by the phase's index too: contexts differ between phases, so a later
phase that uses a source again does not go on where the earlier one stopped but has an order of its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from openzaya.config.recipe import PhaseConfig, SourceConfig
from openzaya.data.conversations import ChatEncoder
from openzaya.data.mixture import Mixture
from openzaya.data.packing import Batch, Row, packed_row, stack
from openzaya.data.readers import RowReader, TaskReader, WholeReader, WindowReader
from openzaya.data.shards import Side, TextStore
from openzaya.data.store import open_store
from openzaya.data.tokenizer import Tokenizer
from openzaya.errors import UserError

# Source name, documents and tokens encoded so far.
SourceProgress = Callable[[str, int, int], None]


class DataPlan:
    """All batches of a run, in any order, and the fixed batches it is evaluated on.

    Attributes:
        stores: Tokenised text sources by name (all that a phase gives a positive share).
        dropped: Documents longer than a phase's context, by (phase index, source), for sources
            with `whole`; only positive counts.
    """

    def __init__(
        self,
        sources: Mapping[str, SourceConfig],
        phases: Sequence[PhaseConfig],
        tokenizer: Tokenizer,
        cache_dir: str | Path,
        seed: int,
        progress: SourceProgress | None = None,
        chat: ChatEncoder | None = None,
    ) -> None:
        """Opens (and where needed tokenises) every source that is used.

        Args:
            sources: The recipe's sources.
            phases: The recipe's phases.
            tokenizer: Encodes all text.
            cache_dir: Where tokenised sources are kept.
            seed: Names the order of everything.
            progress: Called while a source is tokenised.
            chat: Encodes conversations; None takes our own format.

        Raises:
            UserError: if a source cannot be read, is empty, or is shorter than one window.
        """
        self._sources, self._phases = sources, phases
        self._tokenizer, self._seed = tokenizer, seed
        self._chat = chat or ChatEncoder(tokenizer)
        self.stores: dict[str, TextStore] = {}
        self.dropped: dict[tuple[int, str], int] = {}
        self._mixtures = [
            Mixture(
                phase.mixture,
                seed,
                "phase",
                index,
                final=phase.mixture_final,
                slots=phase.slot(phase.steps),
            )
            for index, phase in enumerate(phases)
        ]
        for name in dict.fromkeys(name for mix in self._mixtures for name in mix.sources):
            if sources[name].kind != "tasks":
                report = None if progress is None else _named(progress, name)
                self.stores[name] = open_store(
                    name, sources[name], tokenizer, cache_dir, report, self._chat
                )
        self._readers = [
            {name: self._reader(index, name) for name in mixture.sources}
            for index, mixture in enumerate(self._mixtures)
        ]

    def _reader(self, phase: int, name: str) -> RowReader:
        source, context = self._sources[name], self._phases[phase].context
        keys = (self._seed, "phase", phase, name)
        if source.kind == "tasks":
            return TaskReader(source, self._chat, context, name, *keys)
        side = self.stores[name].train
        if not _kept_whole(source, side):
            return WindowReader(side, context, name, *keys)
        reader = WholeReader(side, context, self._tokenizer.pad_id, name, *keys)
        if reader.dropped:
            self.dropped[phase, name] = reader.dropped
        return reader

    def batch(self, phase: int, step: int) -> Batch:
        """The global batch of a step, counted from 0 within its phase: [sequences, seq]."""
        return self.rows(phase, step, 0, self._phases[phase].sequences(step))

    def rows(self, phase: int, step: int, start: int, stop: int) -> Batch:
        """Rows start to stop - 1 of that batch, without computing the others.

        Raises:
            IndexError: if they do not lie in the batch.
        """
        size = self._phases[phase].sequences(step)
        if not 0 <= start < stop <= size or step < 0:
            raise IndexError(f"rows {start}:{stop} of step {step} with {size} rows in a batch")
        first = self._phases[phase].slot(step)
        return stack([self._row(phase, first + row) for row in range(start, stop)])

    def _row(self, phase: int, slot: int) -> Row:
        name, ordinal = self._mixtures[phase].assign(slot)
        return self._readers[phase][name].row(ordinal)

    def heldout(self, source_name: str, context: int, sequences: int) -> Batch:
        """The source's fixed evaluation batch: at most `sequences` rows, the same in every run.

        Text gives windows spread evenly over the held-out documents (fewer, if there is little
        text; one padded row, if there is less than a window) or packs of whole ones; tasks give
        held-out problems, without talk.

        Raises:
            UserError: if the source keeps nothing for evaluation.
        """
        source, pad_id = self._sources[source_name], self._tokenizer.pad_id
        if source.kind == "tasks":
            reader = TaskReader(
                source, self._chat, context, source_name, "evaluation", heldout=True
            )
            return stack([reader.row(ordinal) for ordinal in range(sequences)])
        side = self._heldout_side(source_name)
        if _kept_whole(source, side):
            packs = WholeReader(side, context, pad_id, source_name, "evaluation")
            count = min(sequences, packs.per_epoch)
            return stack([packs.row(ordinal) for ordinal in range(count)])
        if len(side.tokens) <= context:
            texts = ((side.document(document), None) for document in range(len(side)))
            return stack([packed_row(texts, context, pad_id)])
        windows = WindowReader(side, context, source_name)
        last = len(side.tokens) - context - 1
        count = min(sequences, windows.per_epoch, last // context + 1)
        starts = np.linspace(0, last, count).astype(np.int64).tolist()
        return stack([windows.at(start) for start in starts])

    def _heldout_side(self, name: str) -> Side:
        side = self.stores[name].heldout
        if not len(side) and self._sources[name].kind == "shards":
            raise UserError(
                f"source {name!r}: its shards have no held-out documents: build them with "
                "--heldout above 0, or set the source's `heldout` to 0 to train without evaluating"
            )
        if not len(side):
            raise UserError(
                f"source {name!r} has no held-out documents: give it at least two documents "
                "(`separator` cuts a file into several) and a `heldout` above 0, or set `heldout` "
                "to 0 to train without evaluating it"
            )
        return side


def _kept_whole(source: SourceConfig, side: Side) -> bool:
    """Whether documents are never cut: what is learned of them must not lose what it answers."""
    return source.whole or side.mask is not None


def _named(progress: SourceProgress, name: str) -> Callable[[int, int], None]:
    return lambda documents, tokens: progress(name, documents, tokens)
