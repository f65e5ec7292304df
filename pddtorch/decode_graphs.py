"""Decode steps as recorded graphs: the device is told of a whole step by one call, where each of its launches would cost the host time.

A graph is of a number of rows, a bucket, and serves every step of at most so many rows of one new token each. What differs between
steps (tokens, positions, pages, how keys are split) lies in arrays that never move; a step fills them, replays the graph and copies the
logits out.

Everything here is told to the device on one stream, in the order of the calls: the arrays of a step are overwritten after the replay before
has read them, the tokens that another step feeds are copied after that step chose them, and logits are copied before the next replay
overwrites them. So a step that was started ahead of the last one's tokens needs nothing more, and nobody waits.

All graphs are recorded in ``record_all``, before any step counts; what has no graph runs as it would without, and is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from pddbridge.engine import EngineConfig, Step
from pddkernels.torch_ops import FixedDecode, TorchOps, send, to_device
from pddtorch.batch import Batch
from pddtorch.cuda_graphs import Recorder, Replay

# What is counted, by its reason, where graphs were asked for.
NO_FIXED_KERNELS: Final = "decode_graphs_kernels"
TOO_MANY_ROWS: Final = "eager_decode_rows"
NOT_RECORDED: Final = "eager_decode_not_recorded"
# With more rows a step's products take the device longer than its launches take the host.
MOST_ROWS: Final = 256


def bucket_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Rows of the graphs: powers of two and the most that a step has. Decode is bound by reading weights, so rows that only pad cost
    little, and attention has no work for them.
    """
    most = min(config.max_rows, config.max_step_tokens, MOST_ROWS)
    return (*(1 << bit for bit in range(most.bit_length()) if 1 << bit < most), most)


@dataclass(frozen=True)
class DecodeGraph:
    """``inputs`` [2, num_rows] i64: token ids, positions · ``batch``: what was recorded reads its tensors, so they live as long as it ·
    ``replay`` gives float32 logits [num_rows, vocab].
    """

    num_rows: int
    inputs: torch.Tensor
    batch: Batch
    decode: FixedDecode
    replay: Replay

    @torch.inference_mode()
    def run(self, step: Step, fed: torch.Tensor | None) -> torch.Tensor | None:
        """float32 logits [S, vocab] of the sampling rows, which are the caller's; None if there are none. ``fed`` [R] i64 on the device:
        the tokens, instead of those that ``step`` has.
        """
        count = len(step.context_lens)
        inputs = np.zeros((2, self.num_rows), np.int64)
        inputs[0, :count], inputs[1, :count] = step.token_ids, step.context_lens
        send(inputs, self.inputs)
        if fed is not None:
            self.inputs[0, :count].copy_(fed)
        self.decode.fill(step.context_lens, step.page_tables)
        logits = self.replay()
        rows = [sample.row for sample in step.samples]
        if rows == list(range(count)):
            return logits[:count].clone()
        return logits.index_select(0, to_device(np.array(rows, np.int64), logits.device)) if rows else None


class DecodeGraphs:
    """``forward``: the model's, which gives logits for a batch that has sampling rows · ``num_replays``, ``fallbacks``: of
    :class:`EngineStats`.
    """

    def __init__(
        self, ops: TorchOps, forward: Callable[[Batch], torch.Tensor | None], device: torch.device, recorder: Recorder, config: EngineConfig
    ) -> None:
        self._ops, self._forward, self._device, self._recorder = ops, forward, device, recorder
        self._max_context_tokens = config.max_context_tokens
        self._graphs: dict[int, DecodeGraph] = {}
        self.num_replays = 0
        self.fallbacks: Counter[str] = Counter()
        has_kernels = ops.fixed_decode(1, 1) is not None
        self.sizes = bucket_sizes(config) if has_kernels else ()
        if not has_kernels:
            self.fallbacks[NO_FIXED_KERNELS] = 1

    @property
    def num_recorded(self) -> int:
        return len(self._graphs)

    def record_all(self) -> Iterator[int]:
        """Record the graphs that are not recorded yet, and give the rows of each once it is. The largest is first: the memory that it takes
        is enough for the others, which share it.
        """
        for num_rows in reversed(self.sizes):
            if num_rows not in self._graphs:
                self._graphs[num_rows] = self._record(num_rows)
            yield num_rows

    def find(self, step: Step) -> DecodeGraph | None:
        """The graph for ``step``, None if it runs without."""
        size = self._size_for(step)
        return None if size is None else self._graphs.get(size)

    def count(self, step: Step) -> None:
        """That ``step`` is run: by a graph, or without though it is one of decode rows."""
        if not self.sizes or not _is_decode(step):
            return
        size = self._size_for(step)
        if size in self._graphs:
            self.num_replays += 1
        else:
            self.fallbacks[TOO_MANY_ROWS if size is None else NOT_RECORDED] += 1

    def _size_for(self, step: Step) -> int | None:
        return next((size for size in self.sizes if size >= len(step.context_lens)), None) if _is_decode(step) else None

    @torch.inference_mode()
    def _record(self, num_rows: int) -> DecodeGraph:
        """While it is recorded it has no rows, so it touches no page."""
        decode = self._ops.fixed_decode(num_rows, self._max_context_tokens)
        assert decode is not None
        inputs = torch.zeros((2, num_rows), dtype=torch.int64, device=self._device)
        batch = Batch(inputs[0], inputs[1], decode.kernels, torch.arange(num_rows, device=self._device))

        def run() -> torch.Tensor:
            logits = self._forward(batch)
            assert logits is not None
            return logits

        return DecodeGraph(num_rows, inputs, batch, decode, self._recorder.record(run))


def _is_decode(step: Step) -> bool:
    return len(step.token_ids) == len(step.context_lens) and not step.scores
