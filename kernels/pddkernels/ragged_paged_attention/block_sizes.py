"""Which block sizes the Pallas kernel gets, by TPU generation. Pure numbers; imports no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MIB: Final = 2**20


@dataclass(frozen=True)
class BlockSizes:
    """``query_tokens``: tokens of a query block, a multiple of 16 · ``kv_tokens``: tokens of one page buffer, rounded down to whole pages,
    at least one · ``compute_tokens``: keys of one softmax update, a multiple of 128 · ``vmem_limit_bytes``: what the compiler may use ·
    ``num_cores``: tensor cores that one JAX device drives.
    """

    query_tokens: int
    kv_tokens: int
    compute_tokens: int
    vmem_limit_bytes: int
    num_cores: int = 1


@dataclass(frozen=True)
class _Generation:
    """``vmem_bytes`` of a tensor core, of which the kernel may use three quarters: the rest is XLA's, for what it keeps around the call.
    ``copy_bytes``: of one page buffer: what HBM delivers in about 1.3 microseconds, so that a copy's fixed cost (about a microsecond) and
    the instructions that issue it hide behind the previous one's transfer.
    """

    vmem_bytes: int
    copy_bytes: int
    num_cores: int


# VMEM: jax.experimental.pallas.tpu.get_tpu_info (jax 0.10.2). HBM bandwidth, from the same: v5e 820 GB/s, v5p 2,460 GB/s for two cores that
# JAX shows as one device, v6e 1,640 GB/s.
_GENERATIONS: Final = {
    "v5e": _Generation(128 * _MIB, 1 * _MIB, 1),
    "v5p": _Generation(64 * _MIB, 2 * _MIB, 2),
    "v6e": _Generation(128 * _MIB, 2 * _MIB, 1),
}
GENERATIONS: Final = tuple(_GENERATIONS)

# As jax.Device.device_kind spells them.
_DEVICE_KINDS: Final = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}


def generation_of(device_kind: str) -> str | None:
    """ "v5e", "v5p" or "v6e" for a ``jax.Device.device_kind``; None for one that has no row here."""
    return _DEVICE_KINDS.get(device_kind)


def block_sizes(generation: str, *, num_heads: int, token_bytes: int) -> BlockSizes:
    """Blocks for ``num_heads`` query heads (of one device) and ``token_bytes`` of stored K and V per token and layer, padding included.

    Raises ValueError for a generation that is not in ``GENERATIONS``.
    """
    if generation not in _GENERATIONS:
        raise ValueError(f"generation: given {generation!r}, allowed {list(GENERATIONS)}")
    row = _GENERATIONS[generation]
    # What a query block keeps in float32 grows with heads times tokens.
    query_tokens = 128 if num_heads <= 32 else 64 if num_heads <= 64 else 32
    kv_tokens = max(256, min(2048, row.copy_bytes // token_bytes // 512 * 512))
    # One or two heads are too little work to hide an update's latency behind, so they take more keys each. On a v5e, by libtpu 0.0.52's
    # schedule, one head of a decode row costs 0.83 cycles a key at 256 keys, 0.53 at 512, 0.47 at 1,024; of a 64-token block 3.0, 2.1, 2.4.
    compute_tokens = 512 if token_bytes <= 1024 else 256
    return BlockSizes(query_tokens, kv_tokens, compute_tokens, row.vmem_bytes * 3 // 4, row.num_cores)
