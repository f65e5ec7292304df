"""The KV pool: pages of all layers on the device, head-major, changed in place. Owns their memory and every move in or out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from pddbridge.engine import KVBlock, PendingKV, ReadyKV
from pddbridge.kv_block import check_out
from pddbridge.kv_convert import read_blocks, write_block
from pddbridge.kv_layout import KVLayout
from pddbridge.kv_pool import KVPool as HostPages
from pddbridge.kv_spec import HeadRange, KVGroup, KVSpec, LayerRange, TokenRange
from pddbridge.native.moves import NativeMoves
from pddkernels.torch_ops import TorchOps
from pddtorch.arrays import TORCH_DTYPES, to_numpy, to_torch


class KVPool:
    """Per layer and plane a tensor [num_pages + 1, kv_heads, page_size, dim]. The last page is scratch for warming up, nobody else's."""

    def __init__(
        self, spec: KVSpec, num_pages: int, layout: KVLayout, ops: TorchOps, device: torch.device, moves: NativeMoves | None = None
    ) -> None:
        """``layout``: head-major · ``moves``: on a CPU, see :class:`pddbridge.kv_pool.KVPool`."""
        (self._group,) = _single_group(spec)
        self._spec = spec
        self._ops = ops
        self.scratch_page = num_pages
        self._planes = {
            plane.name: torch.zeros(
                (spec.num_layers, num_pages + 1, plane.num_heads, layout.page_size, plane.head_dim),
                dtype=TORCH_DTYPES[spec.dtype],
                device=device,
            )
            for plane in self._group.planes
        }
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        keys, values = (self._planes[name].unbind(0) for name in ("k", "v"))
        self.layers: tuple[tuple[torch.Tensor, torch.Tensor], ...] = tuple(zip(keys, values, strict=True))
        self._on_host: HostPages | None = None
        if device.type == "cpu":
            self._on_host = HostPages(layout, spec, tuple((to_numpy(k), to_numpy(v)) for k, v in self.layers), moves)

    def read(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> tuple[KVBlock, ...]:
        """One block per plane, all layers and heads, copied to the host. ``page_table`` [P] i32, already checked. On a CPU into ``out``;
        from a GPU into memory of the driver's, as it copies into no other at full speed.
        """
        if out is not None:
            check_out(self._spec, len(tokens), out)
        if self._on_host is not None:
            return read_blocks(self._on_host, page_table, tokens, out)
        return self._blocks(self._packed(page_table, tokens), tokens)

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

    def _packed(self, page_table: np.ndarray, tokens: TokenRange) -> list[torch.Tensor]:
        """Per plane [layers, tokens, heads, dim], on the device."""
        planes = ((self._planes[plane.name], plane.num_heads) for plane in self._group.planes)
        return [self._ops.pack(pool, page_table, tokens.start, tokens.stop, 0, num_heads) for pool, num_heads in planes]

    def _blocks(self, packed: list[torch.Tensor], tokens: TokenRange) -> tuple[KVBlock, ...]:
        layers = LayerRange(0, len(self.layers))
        return tuple(
            KVBlock(plane.name, layers, tokens, HeadRange(0, plane.num_heads), to_numpy(values))
            for plane, values in zip(self._group.planes, packed, strict=True)
        )

    def write(self, page_table: np.ndarray, block: KVBlock) -> None:
        """Place a block, already checked, into its slots and into no other."""
        if self._on_host is not None:
            write_block(self._on_host, page_table, block)
            return
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
