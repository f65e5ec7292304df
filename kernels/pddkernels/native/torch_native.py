"""The native kernels on PyTorch's CPU tensors: what they take, checked, and memory for what they give. All outputs are new tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
import torch.nn.functional as F

from pddkernels.native.build import load
from pddkernels.ragged_paged_attention.options import AttentionOptions

# As in numbers.h.
_FORMATS: Final[Mapping[torch.dtype, int]] = {torch.float32: 0, torch.bfloat16: 1}
NATIVE_DTYPES: Final = frozenset(_FORMATS)
_MAX_HEAD_DIM: Final = 512
_MAX_GROUP_VALUES: Final = 1 << 14
# As in chunk_attention.cpp.
_MAX_CHUNK_HEAD_DIM: Final = 256
_MAX_CHUNK_GROUP: Final = 64
_NO_WINDOW: Final = 1 << 40
_ArgType = type[ctypes.c_void_p] | type[ctypes.c_long] | type[ctypes.c_int] | type[ctypes.c_float]
_POINTER: Final[_ArgType] = ctypes.c_void_p
_LONG: Final[_ArgType] = ctypes.c_long
_INT: Final[_ArgType] = ctypes.c_int
_FLOAT: Final[_ArgType] = ctypes.c_float


@dataclass(frozen=True)
class DecodePlan:
    """Rows of one new token of a step, as layers of one window see them. ``spans`` [n, 4] i64: token in the batch, row of ``tables``, first
    position and the one past the last · ``row_spans`` [rows + 1] i64 · ``tables`` [R, P] i32.
    """

    spans: np.ndarray
    row_spans: np.ndarray
    tables: np.ndarray


@dataclass(frozen=True)
class Chunk:
    """A row with several new tokens: tokens [start, stop) of the batch, after ``context_len`` in its KV. ``table`` [P] i32."""

    start: int
    stop: int
    context_len: int
    table: np.ndarray


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out, in] in the blocks of ``linear.cpp``: bfloat16, or uint8, sign and magnitude, with ``scales`` [out] float32."""

    values: torch.Tensor
    scales: torch.Tensor | None
    num_outputs: int
    num_inputs: int


class Native:
    """Float32 and bfloat16, contiguous unless said otherwise. Threads are OpenMP's, as many as torch has in the calling thread."""

    def __init__(self, cache_dir: str | None) -> None:
        """Raises NativeUnavailableError. See :func:`pddkernels.native.build.load`."""
        library = load(cache_dir)
        self._add_norm = _function(library.pdd_add_norm, _INT, *[_POINTER] * 4, _FLOAT, _POINTER, _LONG, _LONG)
        self._activate = _function(library.pdd_activate, _INT, _INT, _POINTER, _POINTER, _LONG, _LONG)
        self._rotate = _function(library.pdd_rotate, _INT, *[_POINTER] * 4, _FLOAT, *[_POINTER] * 2, *[_LONG] * 4)
        self._append = _function(library.pdd_append, _INT, *[_POINTER] * 3, *[_INT, _POINTER, _LONG] * 2, *[_LONG] * 3)
        self._attend = _function(
            library.pdd_attend,
            *(_INT, _INT, *[_POINTER] * 4, _LONG, _POINTER, _POINTER, _LONG, _LONG),
            *(_POINTER, _FLOAT, _FLOAT, _POINTER, _POINTER, *[_LONG] * 4),
        )
        library.pdd_span.restype = library.pdd_linear_block.restype = _LONG
        self._span = int(library.pdd_span())
        self._block = int(library.pdd_linear_block())
        self._int8 = bool(library.pdd_linear_has_int8())
        if self._block:
            self._linear = _function(library.pdd_linear, _INT, *[_POINTER] * 5, *[_LONG] * 3)
            self._attend_chunk = _function(
                library.pdd_attend_chunk,
                *(*[_POINTER] * 4, *[_LONG] * 3, _POINTER, _FLOAT, _FLOAT, *[_POINTER] * 3, *[_LONG] * 4),
            )

    def add_norm(
        self,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
        post_weight: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """``hidden`` [rows, n] float32 += ``added`` [rows, n] of ``dtype``, first normed with ``post_weight`` where given; returns
        RMSNorm(hidden) * ``weight`` in ``dtype``. Weights [n] float32."""
        out = torch.empty(hidden.shape, dtype=dtype)
        rows, n = hidden.shape
        self._add_norm(_FORMATS[dtype], *_pointers(hidden, added, post_weight, weight), eps, out.data_ptr(), rows, n)
        return out

    def activate(self, gate_up: torch.Tensor, activation: Literal["silu", "gelu_tanh"]) -> torch.Tensor:
        """act(gate) * up, [rows, n], of ``gate_up`` [rows, 2 n]."""
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, n), dtype=gate_up.dtype)
        self._activate(_FORMATS[gate_up.dtype], activation != "silu", gate_up.data_ptr(), out.data_ptr(), rows, n)
        return out

    def rotate(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        norm: torch.Tensor | None,
        eps: float,
        num_heads: int,
        num_kv_heads: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, heads, dim] in the dtype of ``qkv`` [T, heads + 2 kv_heads, dim] and keys [T, kv_heads, dim] float32: rotated,
        half-split, by ``cos`` and ``sin`` [T, 1, dim] float32, the first half of ``sin`` negated. ``norm`` [heads + kv_heads, dim] float32:
        RMSNorm over dim before."""
        tokens, _, dim = qkv.shape
        queries = torch.empty((tokens, num_heads, dim), dtype=qkv.dtype)
        keys = torch.empty((tokens, num_kv_heads, dim), dtype=torch.float32)
        self._rotate(
            *(_FORMATS[qkv.dtype], *_pointers(qkv, cos, sin, norm), eps, queries.data_ptr(), keys.data_ptr()),
            *(tokens, num_heads, num_kv_heads, dim),
        )
        return queries, keys

    def append(self, k_pages: torch.Tensor, v_pages: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """``keys`` and ``values`` [T, kv_heads, dim], contiguous from heads on, to ``rows`` [T * kv_heads] i64 of the pages seen as rows of
        dim values; rounded to nearest even."""
        tokens, kv_heads, dim = keys.shape
        assert all(plane.stride(2) == 1 and plane.stride(1) == dim for plane in (keys, values))
        self._append(
            *(_FORMATS[k_pages.dtype], k_pages.data_ptr(), v_pages.data_ptr(), rows.data_ptr()),
            *(_FORMATS[keys.dtype], keys.data_ptr(), keys.stride(0), _FORMATS[values.dtype], values.data_ptr(), values.stride(0)),
            *(tokens, kv_heads, dim),
        )

    def plan_decode(
        self, row_starts: np.ndarray, context_lens: np.ndarray, page_tables: np.ndarray, window: int | None
    ) -> DecodePlan | None:
        """Of the rows with one new token, see :func:`attend`; None if there are none. Arrays as in the engine contract."""
        rows = np.flatnonzero(np.diff(row_starts) == 1)
        if not rows.size:
            return None
        stops = context_lens[rows].astype(np.int64) + 1
        firsts = np.zeros_like(stops) if window is None else np.maximum(stops - window, 0)
        first_spans = firsts // self._span
        counts = (stops - 1) // self._span - first_spans + 1
        row_spans = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=row_spans[1:])
        number = np.arange(row_spans[-1]) - np.repeat(row_spans[:-1] - first_spans, counts)  # of the span in its row
        begins = np.maximum(number * self._span, np.repeat(firsts, counts))
        ends = np.minimum((number + 1) * self._span, np.repeat(stops, counts))
        spans = np.stack((np.repeat(row_starts[rows].astype(np.int64), counts), np.repeat(rows, counts), begins, ends), axis=1)
        return DecodePlan(np.ascontiguousarray(spans), row_spans, np.ascontiguousarray(page_tables, np.int32))

    def attend(
        self,
        queries: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        plan: DecodePlan,
        options: AttentionOptions,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Attention of the planned rows into their places of ``out``; ``queries``, ``out`` [T, heads, dim], ``sinks`` [heads] float32.

        float32 throughout, rounded once at the end. Slots that a row may not see are not read.
        """
        _, kv_heads, page_size, dim = k_pages.shape
        heads = queries.shape[1]
        scratch = torch.empty(len(plan.spans) * heads * (dim + 2), dtype=torch.float32)
        self._attend(
            *(_FORMATS[queries.dtype], _FORMATS[k_pages.dtype], *_pointers(queries, k_pages, v_pages)),
            *(plan.tables.ctypes.data, plan.tables.shape[1], plan.spans.ctypes.data, plan.row_spans.ctypes.data),
            *(
                len(plan.spans),
                len(plan.row_spans) - 1,
                *_pointers(sinks),
                options.scale,
                options.soft_cap or 0.0,
                scratch.data_ptr(),
                out.data_ptr(),
            ),
            *(kv_heads, heads // kv_heads, page_size, dim),
        )

    def can_attend_chunks(self, dtypes: tuple[torch.dtype, ...], head_dim: int, group: int) -> bool:
        """Whether :func:`attend_chunk` serves queries and pages of these dtypes, ``group`` query heads per KV head."""
        in_bounds = head_dim % 2 == 0 and head_dim <= _MAX_CHUNK_HEAD_DIM and group <= _MAX_CHUNK_GROUP
        return self._block > 0 and in_bounds and all(dtype == torch.bfloat16 for dtype in dtypes)

    def plan_chunks(self, row_starts: np.ndarray, context_lens: np.ndarray, page_tables: np.ndarray) -> tuple[Chunk, ...]:
        """Of the rows with several new tokens. Arrays as in the engine contract."""
        tables = np.ascontiguousarray(page_tables, np.int32)
        rows = np.flatnonzero(np.diff(row_starts) > 1)
        return tuple(Chunk(int(row_starts[row]), int(row_starts[row + 1]), int(context_lens[row]), tables[row]) for row in rows)

    def attend_chunk(
        self,
        queries: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        chunk: Chunk,
        options: AttentionOptions,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """As :func:`attend`, for a row with several new tokens, all bfloat16: float32 scores and sums, weights rounded to bfloat16."""
        _, kv_heads, page_size, dim = k_pages.shape
        heads, block = queries.shape[1], self._block
        window = _NO_WINDOW if options.window is None else options.window
        num_new = chunk.stop - chunk.start
        num_keys = chunk.context_len + num_new - max(0, chunk.context_len - window + 1)
        padded_keys, padded_dim = -(-num_keys // block) * block, -(-dim // block) * block
        k_packed = torch.empty(kv_heads * padded_keys * dim, dtype=torch.bfloat16)
        v_packed = torch.empty(kv_heads * padded_keys * padded_dim, dtype=torch.bfloat16)
        self._attend_chunk(
            *(*_pointers(queries[chunk.start : chunk.stop], k_pages, v_pages), chunk.table.ctypes.data),
            *(num_new, chunk.context_len, window, *_pointers(sinks), options.scale, options.soft_cap or 0.0),
            *_pointers(k_packed, v_packed, out[chunk.start : chunk.stop]),
            *(kv_heads, heads // kv_heads, page_size, dim),
        )

    def can_pack(self, num_inputs: int) -> bool:
        """Whether this processor has products of bfloat16 pairs, and weights of ``num_inputs`` can be packed for them."""
        return self._block > 0 and num_inputs % 2 == 0

    @property
    def has_int8(self) -> bool:
        """Whether it has products with int8 weights, too."""
        return self._int8

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """``weight`` [out, in] bfloat16, of which ``can_pack`` admits the inputs. A copy."""
        return PackedWeight(self._blocks(weight), None, *weight.shape)

    def pack_int8(self, weight: torch.Tensor, scales: torch.Tensor) -> PackedWeight:
        """As ``pack``, of a ``weight`` [out, in] int8 within ±127 in steps of ``scales`` [out] float32. Needs ``has_int8``, too."""
        steps = weight.short()
        blocks = self._blocks((steps.abs() | (steps < 0).short() << 7).to(torch.uint8))
        # Of each 16 bytes, 8 are for the first and 8 for the second register of 32 products.
        ordered = blocks.view(-1, 2, 4, 8).transpose(1, 2).contiguous().view(blocks.shape)
        return PackedWeight(ordered, scales, *weight.shape)

    def linear(self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """``x`` [rows, in] bfloat16 -> [rows, out] in ``dtype``, sums in float32. ``bias`` [out] float32."""
        out = torch.empty((len(x), weight.num_outputs), dtype=dtype)
        self._linear(
            *(_FORMATS[dtype], *_pointers(x, weight.values, weight.scales, bias), out.data_ptr()),
            *(len(x), weight.num_inputs, weight.num_outputs),
        )
        return out

    def _blocks(self, weight: torch.Tensor) -> torch.Tensor:
        padded = F.pad(weight, (0, 0, 0, -len(weight) % self._block))
        blocks = padded.view(-1, self._block, weight.shape[1] // 2, 2).transpose(1, 2)
        return blocks.clone(memory_format=torch.contiguous_format)


def fits(head_dim: int, group: int) -> bool:
    """Whether attention serves heads of this size, ``group`` query heads per KV head."""
    return head_dim <= _MAX_HEAD_DIM and group * head_dim <= _MAX_GROUP_VALUES


def _function(function: ctypes._NamedFuncPointer, *argtypes: _ArgType) -> ctypes._NamedFuncPointer:
    function.argtypes = argtypes
    function.restype = None
    return function


def _pointers(*tensors: torch.Tensor | None) -> tuple[int | None, ...]:
    for tensor in tensors:
        assert tensor is None or (tensor.is_contiguous() and tensor.is_cpu)
    return tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)
