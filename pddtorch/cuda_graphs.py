"""Recording what a device is told, to tell it again at once. The one place that calls CUDA for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch


class Replay(Protocol):
    """What was recorded, once more, in order among all else that the device is told on the current stream. It reads the tensors that the
    recorded call read, where they are, and returns the tensor that it returned: overwritten by this replay or another of the recorder's.
    """

    def __call__(self) -> torch.Tensor: ...


class Recorder(Protocol):
    """``run`` may read no tensor that is freed later, and may neither wait for the device nor depend on values that it has."""

    def record(self, run: Callable[[], torch.Tensor]) -> Replay: ...


# Before a capture: Triton compiles at a first call and cuBLAS takes its workspace, neither of which a capture allows.
_WARM_UPS: Final = 2


class CudaRecorder:
    """CUDA graphs. They share a pool of memory and are replayed one after the other on the stream of whoever calls, so what one leaves in
    it is nobody's once the next one runs. Capturing is done on a stream of its own, as CUDA asks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], torch.Tensor]) -> Replay:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                run()
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may go on with what they do: copies of theirs are no part of this.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = run()
        current.wait_stream(self._stream)
        return _CudaReplay(graph, out)


@dataclass(frozen=True)
class _CudaReplay:
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.out
