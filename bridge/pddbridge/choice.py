"""Who chooses the token of each sampling row of a step, the device or the host, and the records that come of both. One for all engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pddbridge.draw_plan import DrawArrays, DrawPlan, draw_plan, host_reason
from pddbridge.engine import SampleRow
from pddbridge.sampling import needs_host, sample, sample_plain
from pddbridge.sampling_params import SamplingParams, TokenRecord


def why_on_host(params: SamplingParams, position: int, draws: bool) -> str | None:
    """Why the device cannot choose the token at ``position``; None: it does. ``draws``: the engine draws on its device."""
    if params.temperature == 0.0:
        return needs_host(params, position)
    return host_reason(params, position) if draws else "off"


@dataclass(frozen=True)
class Chosen:
    """What the device chose, on the host: the largest logit of each sampling row ``highest``, the ``ids``, and ``margins`` of those that
    were drawn, None if none was.
    """

    highest: Sequence[float]
    ids: Sequence[int]
    margins: Sequence[float] | None


@dataclass(frozen=True)
class Choice:
    """``reasons``: per row, see :func:`why_on_host` · ``draws``: what the device is to draw, None for nothing."""

    rows: tuple[SampleRow, ...]
    reasons: tuple[str | None, ...]
    draws: DrawPlan | None

    @staticmethod
    def of(rows: tuple[SampleRow, ...], draws: bool, vocab_size: int, device_error: float, size: int | None = None) -> Choice:
        """``draws``: whether the device may · ``device_error``: see :func:`pddbridge.draw_plan.draw_plan` · ``size``: to how many rows
        arrays are padded."""
        reasons = tuple(why_on_host(row.params, row.position, draws) for row in rows)
        drawn = [reason is None and row.params.temperature > 0.0 for row, reason in zip(rows, reasons, strict=True)]
        plan = draw_plan(rows, drawn, vocab_size, device_error, len(rows) if size is None else size) if any(drawn) else None
        return Choice(rows, reasons, plan)

    @property
    def arrays(self) -> DrawArrays | None:
        """What the device is told of the rows it draws."""
        return None if self.draws is None else self.draws.arrays

    @property
    def any_on_device(self) -> bool:
        return None in self.reasons

    @property
    def all_on_device(self) -> bool:
        """Also, that there is any."""
        return set(self.reasons) == {None}

    def records(
        self, chosen: Chosen, fetch: Callable[[list[int]], Sequence[np.ndarray]], counts: Counter[str]
    ) -> tuple[tuple[TokenRecord, ...], tuple[int, ...]]:
        """The records, and which of them are not the id that the device chose and may have gone on with.

        ``fetch``: float32 logits [vocab] of some of the rows, brought to the host · ``counts``: of :attr:`EngineStats.chosen`. Raises
        ValueError for a row without a finite largest logit.
        """
        for row, reason, highest in zip(self.rows, self.reasons, chosen.highest, strict=False):
            if reason is None and not np.isfinite(highest):
                raise ValueError(f"logits: the largest of row {row.row} is {highest}, a finite number is needed")
        reasons = [self._doubt(i, chosen) if reason is None else reason for i, reason in enumerate(self.reasons)]
        on_host = [i for i, reason in enumerate(reasons) if reason is not None]
        fetched = dict(zip(on_host, fetch(on_host), strict=True)) if on_host else {}
        records, misfed = [], []
        for i, (row, reason) in enumerate(zip(self.rows, reasons, strict=True)):
            if reason is None:
                counts["argmax" if row.params.temperature == 0.0 else "drawn"] += 1
                records.append(TokenRecord(int(chosen.ids[i])))
                continue
            counts[f"host_{reason}"] += 1
            if reason != "doubt":
                records.append(sample(fetched[i], row.params, row.prompt_ids, row.log_ids, row.position))
                continue
            records.append(sample_plain(fetched[i], row.params, row.position))  # its log may lack the token of the step before
            if records[-1].token_id != chosen.ids[i]:
                misfed.append(i)
        return tuple(records), tuple(misfed)

    def _doubt(self, i: int, chosen: Chosen) -> str | None:
        if self.draws is None or chosen.margins is None or not self.draws.arrays.drawn[i]:
            return None
        return None if chosen.margins[i] > self.draws.tolerances[i] else "doubt"
