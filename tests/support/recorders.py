"""Recorders of decode steps without a GPU, as strict as CUDA's graphs where a mistake would show in values.

What a graph holds is launches with their addresses and numbers. :class:`OpRecorder` keeps the same of PyTorch's operations on a CPU:
numbers that came from the host stay as they were, tensors are read and written where they were. :class:`CallRecorder` runs the whole call
again, for code whose launches are not PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pddtorch.cuda_graphs import Replay

_NEEDS_THE_HOST = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"}


class _Outputs:
    """Results of all graphs share memory: each replay spoils those of all."""

    def __init__(self) -> None:
        self._all: list[torch.Tensor] = []

    def add(self, out: torch.Tensor) -> None:
        self._all.append(out)

    def spoil(self) -> None:
        for out in self._all:
            out.fill_(float("nan"))


class OpRecorder:
    """See the module. ``num_replays``: of all that was recorded."""

    def __init__(self) -> None:
        self._outputs = _Outputs()
        self.num_replays = 0

    def record(self, run: Callable[[], torch.Tensor]) -> Replay:
        run()
        with _Tape() as tape:
            out = run()
        self._outputs.add(out)

        def replay() -> torch.Tensor:
            self.num_replays += 1
            self._outputs.spoil()
            tape.play()
            return out

        return replay


class CallRecorder:
    """See the module."""

    def __init__(self) -> None:
        self._outputs = _Outputs()
        self.num_replays = 0

    def record(self, run: Callable[[], torch.Tensor]) -> Replay:
        out = run()
        self._outputs.add(out)

        def replay() -> torch.Tensor:
            self.num_replays += 1
            self._outputs.spoil()
            return out.copy_(run())

        return replay


class _Tape(TorchDispatchMode):
    """Operations with the very tensors that they took and gave."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[OpOverload, tuple[object, ...], Mapping[str, object], list[torch.Tensor]]] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func.name().split(".")[0] in _NEEDS_THE_HOST:
            raise RuntimeError(f"{func.name()} waits for the device, which nothing recorded may")
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]))
        return out

    def play(self) -> None:
        for func, args, kwargs, recorded in self._calls:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for there, values in zip(recorded, again, strict=True):
                if there.untyped_storage().data_ptr() != values.untyped_storage().data_ptr():  # else a view, or written in place
                    there.copy_(values)
