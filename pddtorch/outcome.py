"""What a step comes to, once somebody waits for it: tokens chosen on the device, or by the shared sampler from logits on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pddbridge.engine import Step, StepResult
from pddbridge.sampling import greedy_suffices, sample
from pddbridge.sampling_params import TokenRecord
from pddtorch.score import score


@dataclass(frozen=True)
class Chosen:
    """The largest logit of each sampling row and the lowest id that has it: ``ids`` [S] i64 on the device · ``host_largest`` [S] f32,
    ``host_ids`` [S] i64: their copies, which are there once ``copied`` has passed (None: at once).
    """

    ids: torch.Tensor
    host_largest: torch.Tensor
    host_ids: torch.Tensor
    copied: torch.cuda.Event | None

    @staticmethod
    def of(logits: torch.Tensor) -> Chosen:
        """Of ``logits`` [S, vocab], without waiting for them."""
        largest, ids = logits.max(-1)  # the first of equals: the lowest id
        if logits.device.type != "cuda":
            return Chosen(ids, largest, ids, None)
        host_largest, host_ids = (torch.empty(values.shape, dtype=values.dtype, pin_memory=True) for values in (largest, ids))
        host_largest.copy_(largest, non_blocking=True)
        host_ids.copy_(ids, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return Chosen(ids, host_largest, host_ids, copied)

    def wait(self) -> tuple[list[float], list[int]]:
        """The largest logits and their ids, on the host."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.host_largest.tolist(), self.host_ids.tolist()


@dataclass(frozen=True)
class TorchStep:
    """See :class:`pddbridge.engine.StepUnderWay`. ``logits`` [samples and scored tokens, vocab] f32, None if there are none · ``chosen``:
    None if no sample is plainly greedy.
    """

    step: Step
    logits: torch.Tensor | None
    chosen: Chosen | None
    feeds_next: bool

    @staticmethod
    def of(step: Step, logits: torch.Tensor | None, run_ahead: bool) -> TorchStep:
        greedy = [greedy_suffices(row.params, row.position) for row in step.samples]
        chosen = Chosen.of(logits[: len(greedy)]) if logits is not None and any(greedy) else None
        return TorchStep(step, logits, chosen, run_ahead and bool(greedy) and all(greedy))

    @torch.inference_mode()
    def result(self) -> StepResult:
        if self.logits is None:
            return StepResult(())
        num_samples = len(self.step.samples)
        return StepResult(self._records(self.logits[:num_samples]), score(self.logits[num_samples:], self.step.scores))

    def _records(self, logits: torch.Tensor) -> tuple[TokenRecord, ...]:
        """Plain argmax on the device where it is enough; for the others their logits, and only theirs, come to the host."""
        samples = self.step.samples
        largest, ids = ([], []) if self.chosen is None else self.chosen.wait()
        others = [index for index, row in enumerate(samples) if not greedy_suffices(row.params, row.position)]
        on_host = dict(zip(others, logits[others].cpu().numpy(), strict=True)) if others else {}
        records = []
        for index, row in enumerate(samples):
            if index in on_host:
                records.append(sample(on_host[index], row.params, row.prompt_ids, row.log_ids, row.position))
            elif not np.isfinite(largest[index]):
                raise ValueError(f"logits: the largest of row {row.row} is {largest[index]}, a finite number is needed")
            else:
                records.append(TokenRecord(ids[index]))
        return tuple(records)
