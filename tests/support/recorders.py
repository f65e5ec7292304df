"""Recorders of decode steps without a GPU, as strict as CUDA's graphs where a mistake would show in values.

What a graph holds is launches with their addresses and numbers. :class:`OpRecorder` keeps the same of PyTorch's operations on a CPU:
numbers that came from the host stay as they were, tensors are read and written where they were. :class:`CallRecorder` runs the whole call
again, for code whose launches are not PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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


@dataclass(frozen=True)
class _Outer:
    """A tensor that a recorded call read and did not make: its address, and no claim to it."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> _Outer:
        storage = StorageWeakRef(tensor.untyped_storage())
        return _Outer(storage, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def there(self) -> torch.Tensor:
        if self.storage.expired():
            raise RuntimeError(f"what was recorded reads a tensor {tuple(self.size)} of {self.dtype} that has been freed")
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class _Tape(TorchDispatchMode):
    """Operations with the very tensors that they took and gave. Of those, what they made themselves is kept, as a graph's memory is; all
    else is somebody's who may free it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[OpOverload, tuple[object, ...], Mapping[str, object], list[torch.Tensor | None]]] = []
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func.name().split(".")[0] in _NEEDS_THE_HOST:
            raise RuntimeError(f"{func.name()} waits for the device, which nothing recorded may")
        out = func(*args, **(kwargs or {}))
        taken = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _has_address(leaf)}
        given = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self._made |= {tensor.untyped_storage().data_ptr() for tensor in given} - taken
        noted_args, noted_kwargs = tree_map(self._noted, (args, kwargs or {}))
        self._calls.append((func, noted_args, noted_kwargs, [tensor if self._is_made(tensor) else None for tensor in given]))
        return out

    def play(self) -> None:
        for func, args, kwargs, recorded in self._calls:
            now_args, now_kwargs = tree_map(_now, (args, kwargs))
            again = [leaf for leaf in tree_leaves(func(*now_args, **now_kwargs)) if isinstance(leaf, torch.Tensor)]
            for there, values in zip(recorded, again, strict=True):
                # Else a view, or written in place.
                if there is not None and there.untyped_storage().data_ptr() != values.untyped_storage().data_ptr():
                    there.copy_(values)

    def _noted(self, leaf: object) -> object:
        return _Outer.of(leaf) if _has_address(leaf) and not self._is_made(leaf) else leaf

    def _is_made(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._made


def _has_address(leaf: object) -> TypeGuard[torch.Tensor]:
    """What oneDNN packed has none, and an empty tensor needs none."""
    return isinstance(leaf, torch.Tensor) and not leaf.is_mkldnn and leaf.untyped_storage().data_ptr() != 0


def _now(leaf: object) -> object:
    return leaf.there() if isinstance(leaf, _Outer) else leaf
