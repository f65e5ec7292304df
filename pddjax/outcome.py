"""What a step comes to, once somebody waits for it: tokens chosen on the device, or by the shared sampler from logits on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from pddbridge.choice import Choice, Chosen
from pddbridge.engine import Step, StepResult
from pddbridge.sampling_params import TokenRecord
from pddbridge.scoring import score_records


class Outcome(NamedTuple):
    """On the device, of S sampling rows padded to a bucket: ``logits`` [vocab, S] f32, their maxima ``highest`` [S], the chosen ``ids``
    [S] i32; ``margins`` [S] f32 of those that were drawn, None if none was.
    """

    logits: jax.Array
    highest: jax.Array
    ids: jax.Array
    margins: jax.Array | None

    def copy_to_host_async(self) -> None:
        """All but the logits."""
        self.highest.copy_to_host_async()
        self.ids.copy_to_host_async()
        if self.margins is not None:
            self.margins.copy_to_host_async()

    def chosen(self) -> Chosen:
        """Waits for the device."""
        margins = None if self.margins is None else np.asarray(self.margins).tolist()
        return Chosen(np.asarray(self.highest).tolist(), np.asarray(self.ids).tolist(), margins)


@dataclass(frozen=True)
class JaxStep:
    """See :class:`pddbridge.engine.StepUnderWay`. ``one_row(logits, i)``: [vocab] f32 of one row, on the device; None: all
    logits come to the host if any must · ``counts``: the engine's, of who chose.
    """

    step: Step
    choice: Choice
    hidden: jax.Array
    outcome: Outcome | None
    scores: tuple[jax.Array, jax.Array, jax.Array] | None
    feeds_next: bool
    one_row: Callable[[jax.Array, int], jax.Array] | None
    counts: Counter[str]

    def result(self) -> StepResult:
        if self.outcome is None:
            jax.block_until_ready(self.hidden)
            return StepResult((), self._scores())
        records, misfed = self.choice.records(self.outcome.chosen(), self._fetch, self.counts)
        return StepResult(records, self._scores(), misfed if self.feeds_next else ())

    def _fetch(self, rows: list[int]) -> list[np.ndarray]:
        """Those rows alone, unless all logits are no more than twice as much."""
        assert self.outcome is not None
        logits = self.outcome.logits
        if self.one_row is not None and 2 * len(rows) < logits.shape[1]:
            return [np.asarray(row) for row in [self.one_row(logits, i) for i in rows]]
        on_host = np.asarray(logits)
        return [np.ascontiguousarray(on_host[:, i]) for i in rows]

    def _scores(self) -> tuple[tuple[TokenRecord, ...], ...]:
        if self.scores is None:
            return ()
        num_scored = sum(len(row.next_ids) for row in self.step.scores)
        chosen, top, ids = (np.asarray(values)[:num_scored] for values in self.scores)
        return score_records(self.step.scores, chosen, top, ids)
