"""What a step comes to, once somebody waits for it: tokens chosen on the device, or by the shared sampler from logits on the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from pddbridge.choice import Choice, Chosen
from pddbridge.engine import Step, StepResult
from pddtorch.draw import draw
from pddtorch.score import score


@dataclass(frozen=True)
class OnDevice:
    """What the device chose for each sampling row: ``ids`` [S] i64 on the device · ``host_ids`` [S] i64, ``host_highest`` [S] f32, the
    largest logits, and ``host_margins`` [S] f32, None if no row was drawn: copies, which are there once ``copied`` has passed (None: at
    once).
    """

    ids: torch.Tensor
    host_ids: torch.Tensor
    host_highest: torch.Tensor
    host_margins: torch.Tensor | None
    copied: torch.cuda.Event | None

    @staticmethod
    def of(logits: torch.Tensor, choice: Choice) -> OnDevice:
        """Of ``logits`` [S, vocab], without waiting for them."""
        highest, ids = logits.max(-1)  # the first of equals: the lowest id
        margins = None
        if choice.arrays is not None:
            ids, margins = draw(logits, highest, ids, choice.arrays)
        if logits.device.type != "cuda":
            return OnDevice(ids, ids, highest, margins, None)
        host_ids, host_highest = _copy(ids), _copy(highest)
        host_margins = None if margins is None else _copy(margins)
        copied = torch.cuda.Event()
        copied.record()
        return OnDevice(ids, host_ids, host_highest, host_margins, copied)

    def wait(self) -> Chosen:
        if self.copied is not None:
            self.copied.synchronize()
        margins = None if self.host_margins is None else self.host_margins.tolist()
        return Chosen(self.host_highest.tolist(), self.host_ids.tolist(), margins)


@dataclass(frozen=True)
class TorchStep:
    """See :class:`pddbridge.engine.StepUnderWay`. ``logits`` [samples and scored tokens, vocab] f32, None if there are none · ``chosen``:
    None if the device chooses no sample · ``counts``: the engine's, of who chose.
    """

    step: Step
    choice: Choice
    logits: torch.Tensor | None
    chosen: OnDevice | None
    feeds_next: bool
    counts: Counter[str]

    @staticmethod
    def of(step: Step, choice: Choice, logits: torch.Tensor | None, run_ahead: bool, counts: Counter[str]) -> TorchStep:
        on_device = logits is not None and choice.any_on_device
        chosen = OnDevice.of(logits[: len(step.samples)], choice) if logits is not None and on_device else None
        return TorchStep(step, choice, logits, chosen, run_ahead and choice.all_on_device, counts)

    @torch.inference_mode()
    def result(self) -> StepResult:
        """Of the logits, only those that the host must look at come to it."""
        if self.logits is None:
            return StepResult(())
        chosen = Chosen((), (), None) if self.chosen is None else self.chosen.wait()
        records, misfed = self.choice.records(chosen, self._fetch, self.counts)
        return StepResult(records, score(self.logits[len(self.step.samples) :], self.step.scores), misfed if self.feeds_next else ())

    def _fetch(self, rows: list[int]) -> list[np.ndarray]:
        assert self.logits is not None
        return list(self.logits[rows].cpu().numpy())


def _copy(values: torch.Tensor) -> torch.Tensor:
    """On its way to the host."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
