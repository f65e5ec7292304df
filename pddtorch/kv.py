"""The KV pool: pages of all layers on the device, head-major, changed in place. Owns their memory and every move in or out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from pddbridge.engine import KVBlock, PendingKV, ReadyKV
from pddbridge.kv_block import check_out
from pddbridge.kv_spec import HeadRange, KVGroup, KVSpec, LayerRange, TokenRange
from pddkernels.torch_ops import TorchOps
from pddtorch.arrays import TORCH_DTYPES, to_numpy, to_torch


class KVPool:
    """Per layer and plane a tensor [num_pages + 1, kv_heads, page_size, dim]. The last page is scratch for warming up, nobody else's."""

    def __init__(self, spec: KVSpec, num_pages: int, page_size: int, ops: TorchOps, device: torch.device) -> None:
        (self._group,) = _single_group(spec)
        self._spec = spec
        self._ops = ops
        self.scratch_page = num_pages
        self._planes = {
            plane.name: torch.zeros(
                (spec.num_layers, num_pages + 1, plane.num_heads, page_size, plane.head_dim), dtype=TORCH_DTYPES[spec.dtype], device=device
            )
            for plane in self._group.planes
        }
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        keys, values = (self._planes[name].unbind(0) for name in ("k", "v"))
        self.layers: tuple[tuple[torch.Tensor, torch.Tensor], ...] = tuple(zip(keys, values, strict=True))

    def read(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> tuple[KVBlock, ...]:
        """One block per plane, all layers and heads, copied to the host. ``page_table`` [P] i32, already checked. On a CPU into ``out``;
        from a GPU into memory of the driver's, as it copies into no other at full speed.
        """
        if out is not None:
            check_out(self._spec, len(tokens), out)
        return self._blocks(self._packed(page_table, tokens, None if self._copies else out), tokens)

    def start_read(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> PendingKV:
        """As ``read``; on a GPU a stream of its own copies into pinned memory, beside what is computed next."""
        if self._copies is None:
            return ReadyKV(self.read(page_table, tokens, out))
        packed = self._packed(page_table, tokens)
        # Packed on the compute stream, so in order with what writes the pages before and after; the copy reads only what was packed.
        self._copies.wait_stream(torch.cuda.current_stream(self._copies.device))
        host = [torch.empty(values.shape, dtype=values.dtype, pin_memory=True) for values in packed]
        with torch.cuda.stream(self._copies):
            for there, values in zip(host, packed, strict=True):
                there.copy_(values, non_blocking=True)
                values.record_stream(self._copies)  # its memory is not given out again before the copy is done
            copied = torch.cuda.Event()
            copied.record(self._copies)
        return _Copying(copied, partial(self._blocks, host, tokens))

    def _packed(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> list[torch.Tensor]:
        """Per plane [layers, tokens, heads, dim], on the device; on a CPU that is ``out`` where it is given."""
        planes = [(self._planes[plane.name], plane.num_heads) for plane in self._group.planes]
        into = [None] * len(planes) if out is None else [to_torch(array) for array in out]
        return [
            self._ops.pack(pool, page_table, tokens.start, tokens.stop, 0, num_heads, out=place)
            for (pool, num_heads), place in zip(planes, into, strict=True)
        ]

    def _blocks(self, packed: list[torch.Tensor], tokens: TokenRange) -> tuple[KVBlock, ...]:
        layers = LayerRange(0, len(self.layers))
        return tuple(
            KVBlock(plane.name, layers, tokens, HeadRange(0, plane.num_heads), to_numpy(values))
            for plane, values in zip(self._group.planes, packed, strict=True)
        )

    def write(self, page_table: np.ndarray, block: KVBlock) -> None:
        """Place a block, already checked, into its slots and into no other."""
        pool = self._planes[block.plane]
        values = to_torch(block.values)
        if self._copies is not None:
            values = values.pin_memory()  # a copy, so the block's memory is free; from here the device fetches it while the next one comes
        values = values.to(pool.device, non_blocking=True)
        self._ops.unpack(pool[block.layers.start : block.layers.stop], values, page_table, block.tokens.start, block.heads.start)

    def copy_page(self, source: int, destination: int) -> None:
        """All layers, planes, heads and slots of a page."""
        for pool in self._planes.values():
            pool[:, destination].copy_(pool[:, source])


@dataclass(frozen=True)
class _Copying:
    """See :class:`pddbridge.engine.PendingKV`."""

    copied: torch.cuda.Event
    make: Callable[[], tuple[KVBlock, ...]]

    @property
    def ready(self) -> bool:
        return bool(self.copied.query())

    def blocks(self) -> tuple[KVBlock, ...]:
        self.copied.synchronize()
        return self.make()


def _single_group(spec: KVSpec) -> tuple[KVGroup]:
    if len(spec.groups) != 1 or [plane.name for plane in spec.groups[0].planes] != ["k", "v"]:
        raise ValueError(f"KVSpec.groups: given {spec.groups}, allowed one group with planes k and v")
    return (spec.groups[0],)
