"""The paged KV of an engine: one array per layer, owned here and lent to compiled programs that update it in place.

Reading, writing and copying are programs for one layer, called once per layer: they compile in a tenth of a second whatever the depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from pddbridge.engine import EngineConfig, KVBlock, PendingKV
from pddbridge.kv_block import check_out
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddjax.batch import padding_slots, slots_of
from pddjax.buckets import KV_TOKENS
from pddjax.programs import Programs
from pddkernels.jax_ops import JaxOps

PLANES: Final = ("k", "v")  # in the order in which a head's planes lie side by side


@dataclass(frozen=True)
class Placement:
    """Where the pages are. ``device``: one, or how they are split over ``num_devices`` · ``ops``: of one device · ``copies``: each KV head
    is stored so often, side by side, where there are more devices than KV heads · ``read``, ``write``, ``copy_page``: the functions of one
    layer's pages that are compiled.
    """

    device: jax.Device | jax.sharding.Sharding
    ops: JaxOps
    read: Callable[..., object]
    write: Callable[..., object]
    copy_page: Callable[..., object]
    num_devices: int = 1
    copies: int = 1

    @staticmethod
    def on_one(device: jax.Device, ops: JaxOps) -> Placement:
        return Placement(device, ops, ops.read, ops.write, ops.copy_page)


@dataclass(frozen=True)
class _Piece:
    """Tokens ``[start, start + count)`` of a range that is being read: per layer K and V [KV_TOKENS, heads, dim], on the device."""

    start: int
    count: int
    by_layer: list[tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class _Reading:
    """See :class:`pddbridge.engine.PendingKV`."""

    read: list[_Piece]
    assemble: Callable[[], tuple[KVBlock, ...]]

    @property
    def ready(self) -> bool:
        return all(values.is_ready() for piece in self.read for stored in piece.by_layer for values in stored)

    def blocks(self) -> tuple[KVBlock, ...]:
        return self.assemble()


class KVPool:
    """``pages``: per layer [num_pages, page_size, planes of all devices, dim] in storage form. Whoever runs a program that takes them over
    puts back what the program returns.
    """

    def __init__(self, config: EngineConfig, kv_spec: KVSpec, placement: Placement, programs: Programs) -> None:
        plane = kv_spec.groups[0].planes[0]
        self._config, self._kv_spec, self._programs, self._placement = config, kv_spec, programs, placement
        self._heads, self._dim = plane.num_heads, plane.head_dim
        self._storage = placement.ops.storage_dtype
        self._stored_heads = plane.num_heads * placement.copies
        planes, dim = placement.ops.token_shape
        shape = (config.num_pages, config.page_size, planes * placement.num_devices, dim)
        self.pages = [jnp.zeros(shape, self._storage, device=placement.device) for _ in range(kv_spec.num_layers)]

    def read(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> tuple[KVBlock, ...]:
        """K and V of ``tokens``: all layers, all heads, wire order, bit for bit as stored; in ``out`` if it is given."""
        return self._assemble(tokens, self._planes_for(tokens, out), self._start_pieces(page_table, tokens))

    def start_read(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> PendingKV:
        """As ``read``; returns once the device has been told to read and to copy. What is read is apart from the pages from then on."""
        planes = self._planes_for(tokens, out)
        read = self._start_pieces(page_table, tokens)
        for piece in read:
            for stored in piece.by_layer:
                for values in stored:
                    values.copy_to_host_async()
        return _Reading(read, partial(self._assemble, tokens, planes, read))

    def _start_pieces(self, page_table: np.ndarray, tokens: TokenRange) -> list[_Piece]:
        read = self._read_program()
        pieces = self._pieces(page_table, tokens)
        return [_Piece(start, count, [read(pages, slots) for pages in self.pages]) for start, count, slots in pieces]

    def _planes_for(self, tokens: TokenRange, out: Sequence[np.ndarray] | None) -> tuple[np.ndarray, ...]:
        """K and V [layers, tokens, heads, dim] in storage form, to be filled."""
        if out is not None:
            check_out(self._kv_spec, len(tokens), out)
            return tuple(array.view(self._storage) for array in out)
        shape = (self._kv_spec.num_layers, len(tokens), self._heads, self._dim)
        return tuple(np.empty(shape, self._storage) for _ in PLANES)

    def _assemble(self, tokens: TokenRange, planes: tuple[np.ndarray, ...], read: list[_Piece]) -> tuple[KVBlock, ...]:
        for piece in read:
            start, count = piece.start, piece.count
            for layer, stored in enumerate(piece.by_layer):
                for plane, values in zip(planes, stored, strict=True):
                    plane[layer, start : start + count] = np.asarray(values)[:count, :: self._placement.copies]
        layers, heads = LayerRange(0, self._kv_spec.num_layers), HeadRange(0, self._heads)
        return tuple(
            KVBlock(name, layers, tokens, heads, values.view(self._kv_spec.np_dtype)) for name, values in zip(PLANES, planes, strict=True)
        )

    def write(self, page_table: np.ndarray, block: KVBlock) -> None:
        """Place a block, bit for bit; nothing outside its plane, layers, tokens and heads changes."""
        heads = slice(block.heads.start, block.heads.stop)
        by_plane = np.zeros((self._heads, len(PLANES)), np.bool_)
        by_plane[heads, PLANES.index(block.plane)] = True
        wanted = np.repeat(by_plane, self._placement.copies, axis=0).ravel()
        stored = block.values.view(self._storage)
        for start, count, slots in self._pieces(page_table, block.tokens):
            for layer in range(block.layers.start, block.layers.stop):
                piece = np.zeros((len(slots), self._heads, self._dim), self._storage)
                piece[:count, heads] = stored[layer - block.layers.start, start : start + count]
                piece = np.repeat(piece, self._placement.copies, axis=1) if self._placement.copies > 1 else piece
                self.pages[layer] = self._write_program()(self.pages[layer], piece, wanted, slots)

    def copy_page(self, source: int, destination: int) -> None:
        """All slots of page ``source`` over page ``destination``, every layer."""
        numbers = (np.int32(source), np.int32(destination))
        program = self._programs.get("copy_page", 0, self._placement.copy_page, 0, (self.pages[0], *numbers))
        self.pages = [program(pages, *numbers) for pages in self.pages]

    def warm_up(self) -> None:
        """Compile and run reading, writing and copying; changes no page."""
        slots = padding_slots(self._config, KV_TOKENS)
        jax.block_until_ready(self._read_program()(self.pages[0], slots))
        piece = np.zeros((KV_TOKENS, self._stored_heads, self._dim), self._storage)
        nothing = np.zeros(len(PLANES) * self._stored_heads, np.bool_)
        self.pages[0] = self._write_program()(self.pages[0], piece, nothing, slots)
        self.copy_page(0, 0)

    def _read_program(self) -> jax.stages.Compiled:
        slots = jax.ShapeDtypeStruct((KV_TOKENS,), np.int32)
        return self._programs.get("read_kv", KV_TOKENS, self._placement.read, None, (self.pages[0], slots))

    def _write_program(self) -> jax.stages.Compiled:
        stored = jax.ShapeDtypeStruct((KV_TOKENS, self._stored_heads, self._dim), self._storage)
        wanted = jax.ShapeDtypeStruct((len(PLANES) * self._stored_heads,), np.bool_)
        slots = jax.ShapeDtypeStruct((KV_TOKENS,), np.int32)
        return self._programs.get("write_kv", KV_TOKENS, self._placement.write, 0, (self.pages[0], stored, wanted, slots))

    def _pieces(self, page_table: np.ndarray, tokens: TokenRange) -> Iterator[tuple[int, int, np.ndarray]]:
        """``tokens`` cut into pieces: (offset in the range, tokens, slots [KV_TOKENS] padded past the pool)."""
        for start in range(0, len(tokens), KV_TOKENS):
            count = min(KV_TOKENS, len(tokens) - start)
            slots = padding_slots(self._config, KV_TOKENS)
            positions = np.arange(tokens.start + start, tokens.start + start + count)
            slots[:count] = slots_of(page_table, positions, self._config.page_size)
            yield start, count, slots
