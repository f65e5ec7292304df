"""L0: random bits through one engine's pages, the wire, the other's pages and back are the same bits, and nothing else changed."""

from __future__ import annotations

import numpy as np

from pdd.conform.compare import bits, first_unequal
from pdd.conform.report import Check
from pdd.conform.steps import ScatteredPages
from pdd.conform.wire import move_kv
from pddbridge.engine import Engine, KVBlock
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange


def check_bytes(source: Engine, target: Engine, way: str, num_tokens: int, seed: int) -> tuple[Check, ...]:
    """Bits of ``num_tokens`` tokens, NaNs with payloads among them, from ``source`` to ``target``; both keep other rows' KV meanwhile."""
    spec, tokens = source.kv_spec, TokenRange(0, num_tokens)
    sent, kept = random_blocks(spec, tokens, seed), random_blocks(spec, tokens, seed + 1)
    pages = {engine: ScatteredPages(engine, seed) for engine in {source, target}}
    here, there, beside = pages[source].take(num_tokens), pages[target].take(num_tokens), pages[target].take(num_tokens)
    for block in sent:
        source.write_kv(here, block)
    for block in kept:
        target.write_kv(beside, block)
    num_bytes = move_kv(source, here, target, there, tokens, seed)
    for where, engine, table, wanted in (
        ("in the sender's pages", source, here, sent),
        ("in the receiver's pages", target, there, sent),
        ("in a neighbour's pages", target, beside, kept),
    ):
        for got, want in zip(engine.read_kv(table, tokens), wanted, strict=True):
            found = first_unequal(got.values, want.values)
            if found is not None:
                count, place = found
                return (_failed(way, spec, engine, count, where, want, place, got),)
    return (Check("L0", spec.dtype, way, "KV bits", True, error=0.0, tolerance=0.0, note=f"{num_bytes / 1e6:.1f} MB of frames"),)


def random_blocks(spec: KVSpec, tokens: TokenRange, seed: int) -> tuple[KVBlock, ...]:
    """One block per plane of random bit patterns, in the order of ``Engine.read_kv``."""
    rng = np.random.default_rng(seed)
    blocks = []
    for group in spec.groups:
        for plane in group.planes:
            dtype = spec.np_dtype_of(plane)
            shape = (group.num_layers, len(tokens), plane.num_heads, plane.head_dim * dtype.itemsize)
            values = rng.integers(0, 256, shape, dtype=np.uint8).view(dtype)
            layers = LayerRange(group.first_layer, group.first_layer + group.num_layers)
            blocks.append(KVBlock(plane.name, layers, tokens, HeadRange(0, plane.num_heads), values))
    return tuple(blocks)


def _failed(way: str, spec: KVSpec, engine: Engine, count: int, pages: str, want: KVBlock, place: tuple[int, ...], got: KVBlock) -> Check:
    layer, token, head, dim = place
    page, slot = divmod(token, engine.config.page_size)
    was, became = (int(bits(block.values)[place]) for block in (want, got))
    where = (
        f"{want.plane} layer {want.layers.start + layer} head {head} token {token} (page {page} of the row, slot {slot}) dim {dim}:"
        f" {was:#x} became {became:#x}"
    )
    return Check("L0", spec.dtype, way, "KV bits", False, where=where, note=f"{count} values differ {pages}")
