"""How much an operation must compute and move at least: counted from shapes, not from code, for the roofline. Imports no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pddkernels.shapes import ModelShape
from pddkernels.targets.hardware import Chip

KV_ITEMSIZE: Final = 2  # bfloat16, as are weights and activations here


class Row(NamedTuple):
    """A row of a step: its tokens already in KV, its new ones."""

    context_len: int
    num_new: int


@dataclass(frozen=True)
class Work:
    """``flops``: a multiply-add is two · ``num_bytes``: each operand read once and each result written once."""

    flops: float
    num_bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.num_bytes + other.num_bytes)

    def __mul__(self, times: float) -> Work:
        return Work(self.flops * times, self.num_bytes * times)


@dataclass(frozen=True)
class Bound:
    """The least time that work takes on a chip: the longer of what its FLOPs take at peak and what its bytes take."""

    flops_s: float
    bytes_s: float

    @property
    def seconds(self) -> float:
        return max(self.flops_s, self.bytes_s)

    @property
    def by(self) -> str:
        return "flops" if self.flops_s > self.bytes_s else "bytes"


def bound(work: Work, chip: Chip) -> Bound:
    """Roofline model (doi:10.1145/1498765.1498785)."""
    return Bound(work.flops / chip.flops_s, work.num_bytes / chip.bytes_s)


def attention(rows: Sequence[Row], num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None) -> Work:
    """Scores and sums of the visible keys; queries and results once, a row's keys and values once for all its queries."""
    seen = keys = tokens = 0
    for context_len, num_new in rows:
        if window is None:
            seen += num_new * context_len + num_new * (num_new + 1) // 2
            keys += context_len + num_new
        else:
            seen += sum(min(window, context_len + i + 1) for i in range(num_new))
            keys += min(context_len, window - 1) + num_new
        tokens += num_new
    values = 2 * tokens * num_heads * head_dim + 2 * keys * num_kv_heads * head_dim
    return Work(4.0 * seen * num_heads * head_dim, float(values * KV_ITEMSIZE))


def latent_attention(rows: Sequence[Row], num_heads: int, latent_dim: int, rope_dim: int) -> Work:
    """MLA in its absorbed form: scores over latent and rope dims, sums over latent dims; keys and values are one latent."""
    seen = sum(new * context_len + new * (new + 1) // 2 for context_len, new in rows)
    keys, tokens = sum(context_len + new for context_len, new in rows), sum(new for _, new in rows)
    values = tokens * num_heads * (2 * latent_dim + rope_dim) + keys * (latent_dim + rope_dim)
    return Work(2.0 * seen * num_heads * (2 * latent_dim + rope_dim), float(values * KV_ITEMSIZE))


def copy(num_values: int, itemsize: int = KV_ITEMSIZE) -> Work:
    """Reading and writing ``num_values``."""
    return Work(0.0, 2.0 * num_values * itemsize)


def step(rows: Sequence[Row], shape: ModelShape, num_samples: int, num_devices: int = 1, weight_itemsize: int = KV_ITEMSIZE) -> Work:
    """One engine step of a dense decoder on one of ``num_devices`` that share it evenly: every weight once, products, attention, new KV.

    The head is applied to ``num_samples`` rows. The embedding is looked up, not read. Not counted: activations between layers, and scales
    of weights in int8, of which an output has one.
    """
    tokens = sum(new for _, new in rows)
    hidden, dim = shape.hidden_size, shape.head_dim
    per_layer = hidden * dim * (2 * shape.num_heads + 2 * shape.num_kv_heads) + 3 * hidden * shape.intermediate_size
    head = shape.vocab_size * hidden
    products = Work(2.0 * tokens * per_layer, float(per_layer * weight_itemsize)) * shape.num_layers
    logits = Work(2.0 * num_samples * head, float(head * weight_itemsize) if num_samples else 0.0)
    mixing = attention(rows, shape.num_heads, shape.num_kv_heads, dim) * shape.num_layers
    stored = Work(0.0, float(tokens * shape.kv_values_per_token * KV_ITEMSIZE))
    return (products + logits + mixing + stored) * (1 / num_devices)
