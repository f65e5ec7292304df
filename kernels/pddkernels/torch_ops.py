"""The one place where PyTorch code gets its kernels: which path a device runs, decided once, and what an engine calls per step and layer.

Triton's modules are imported only where they are chosen: an installation for CPUs needs none.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from pddkernels.kv_pages import portable_torch as portable_pages
from pddkernels.native.torch_native import NATIVE_DTYPES, Chunk, Native, fits
from pddkernels.native.torch_native import DecodePlan as NativeDecodePlan
from pddkernels.ragged_paged_attention import portable_torch as portable_attention
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.ragged_paged_attention.triton_decode_plan import DecodePlan
from pddkernels.ragged_paged_attention.triton_plan import Plan, plan
from pddkernels.ragged_paged_attention.triton_tiles import Geometry, Gpu, Tiles, tiles_for, unsupported

PORTABLE: Final = "portable"
NATIVE: Final = "native"
TRITON: Final = "triton"
# What is counted, by its reason, where a device has kernels and these are not used.
NO_TRITON: Final = "portable_kernels_no_triton"
UNKNOWN_DTYPE: Final = "portable_kernels_dtype"
UNKNOWN_SHAPE: Final = "portable_kernels_shape"
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Problem:
    """What kernels are chosen for. ``windows``: of the model's layers, None for a layer that sees everything · ``query_dtype``: the compute
    dtype."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    query_dtype: torch.dtype
    kv_dtype: torch.dtype
    windows: tuple[int | None, ...] = (None,)

    @property
    def wider_dtype(self) -> torch.dtype:
        return torch.promote_types(self.query_dtype, self.kv_dtype)

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.num_heads, self.num_kv_heads, self.head_dim, self.page_size, self.wider_dtype.itemsize)


class StepKernels(Protocol):
    """One step's plan, on the device: what every layer of it calls."""

    def append(self, k_pages: torch.Tensor, v_pages: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the new tokens' ``keys`` and ``values`` [T, kv_heads, dim], rounded to nearest even, in a layer's pages."""

    def attend(
        self,
        queries: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        options: AttentionOptions,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, heads, dim] for ``queries`` [T, heads, dim], by :mod:`pddkernels.ragged_paged_attention.reference`. ``options.window`` is one
        of the problem's."""


class FixedDecode(Protocol):
    """The kernels of a step of decode rows, of up to so many rows, whose arrays stay where they are: what a captured graph can replay."""

    @property
    def kernels(self) -> StepKernels: ...

    def fill(self, context_lens: np.ndarray, page_tables: np.ndarray) -> None:
        """Before each step, on the host: ``context_lens`` [R], ``page_tables`` [R, P] i32, one new token per row. Ordered among what the
        device is told; waits for nothing. The other rows store no KV, and what they attend is arbitrary."""


class TorchOps(Protocol):
    """The path of one device and problem. ``fallbacks``: by name, how often a path was chosen that is not the device's best."""

    @property
    def path(self) -> str: ...
    @property
    def fallbacks(self) -> Mapping[str, int]: ...

    def plan(self, row_starts: np.ndarray, context_lens: np.ndarray, page_tables: np.ndarray) -> StepKernels:
        """Once per step, on the host: ``row_starts`` [R+1], ``context_lens`` [R], ``page_tables`` [R, P] i32."""

    def fixed_decode(self, num_rows: int, max_context_tokens: int) -> FixedDecode | None:
        """For steps of up to ``num_rows`` decode rows of up to ``max_context_tokens`` tokens, new ones among them. None: this path's
        launches depend on the rows."""

    def pack(self, layers: torch.Tensor, page_table: np.ndarray, start: int, stop: int, first_head: int, num_heads: int) -> torch.Tensor:
        """Tokens [start, stop) and heads of one plane in wire order [layers, tokens, num_heads, dim], of ``layers`` [L, N, kv_heads,
        page_size, dim]."""

    def unpack(self, layers: torch.Tensor, values: torch.Tensor, page_table: np.ndarray, start: int, first_head: int) -> None:
        """The way back, for ``values`` [L, tokens, heads, dim] in the dtype of ``layers``."""


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """``array`` on ``device``. From pinned memory where that is a GPU: a copy from anywhere else first waits for all that the GPU has been
    told.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def send(array: np.ndarray, out: torch.Tensor) -> None:
    """``array`` into ``out``, as :func:`to_device` in that nothing waits: in order among all that the device is told."""
    tensor = torch.from_numpy(array)
    out.copy_(tensor.pin_memory() if out.is_cuda else tensor, non_blocking=True)


def choose(problem: Problem, device: torch.device, native: Native | None = None) -> TorchOps:
    """Triton's kernels on a GPU, ``native`` ones on a CPU where it has them, else plain PyTorch: counted as a fallback where the device's
    own kernels cannot serve."""
    if device.type != "cuda" and native is None:
        return PortableOps(problem, device, {})
    if device.type != "cuda":
        reason = native_unavailable(problem)
        return NativeOps(problem, device, {}, NATIVE, native) if reason is None else PortableOps(problem, device, {reason: 1})
    reason = unavailable(problem)
    if reason is not None:
        return PortableOps(problem, device, {reason: 1})
    return triton_ops(problem, device, gpu_of(device))


def unavailable(problem: Problem) -> str | None:
    """Why Triton's kernels cannot serve a problem here, the name of a fallback; None if they can."""
    if problem.query_dtype not in _DTYPES or problem.kv_dtype not in _DTYPES:
        return UNKNOWN_DTYPE
    if unsupported(problem.geometry) is not None:
        return UNKNOWN_SHAPE
    return None if importlib.util.find_spec("triton") else NO_TRITON


def native_unavailable(problem: Problem) -> str | None:
    """As :func:`unavailable`, for the CPU's native kernels."""
    if not {problem.query_dtype, problem.kv_dtype} <= NATIVE_DTYPES:
        return UNKNOWN_DTYPE
    return None if fits(problem.head_dim, problem.num_heads // problem.num_kv_heads) else UNKNOWN_SHAPE


def triton_ops(problem: Problem, device: torch.device, gpu: Gpu, tiles: Tiles | None = None) -> TritonOps:
    """Triton's kernels whatever the device is: on a CPU they run where Triton interprets. ``tiles``: by default those for ``gpu``."""
    return TritonOps(problem, device, tiles_for(problem.geometry, gpu) if tiles is None else tiles, gpu.num_processors)


def gpu_of(device: torch.device) -> Gpu:
    """What kernels are cut for on a CUDA or ROCm ``device``."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Gpu("gfx942", properties.multi_processor_count, 64 * 1024)
    # Warp-group products are sm_90's alone; every other has those of sm_80.
    family = "sm90" if properties.major == 9 else "sm80"
    return Gpu(family, properties.multi_processor_count, properties.shared_memory_per_block_optin)


@dataclass(frozen=True)
class PortableOps:
    """Plain PyTorch operations, for any device."""

    problem: Problem
    device: torch.device
    fallbacks: Mapping[str, int]
    path: str = PORTABLE

    def plan(self, row_starts: np.ndarray, context_lens: np.ndarray, page_tables: np.ndarray) -> StepKernels:
        problem = self.problem
        _, rows = portable_pages.new_token_rows(row_starts, context_lens, page_tables, problem.num_kv_heads, problem.page_size)
        attention = self._plan_attention(row_starts, context_lens, page_tables, decodes=True)
        return _PortableStep(to_device(rows, self.device), attention)

    def fixed_decode(self, num_rows: int, max_context_tokens: int) -> FixedDecode | None:
        return None

    def pack(self, layers: torch.Tensor, page_table: np.ndarray, start: int, stop: int, first_head: int, num_heads: int) -> torch.Tensor:
        rows = self._rows(layers, page_table, start, stop, first_head, num_heads)
        return portable_pages.pack_tokens(layers.unbind(0), rows, num_heads)

    def unpack(self, layers: torch.Tensor, values: torch.Tensor, page_table: np.ndarray, start: int, first_head: int) -> None:
        rows = self._rows(layers, page_table, start, start + values.shape[1], first_head, values.shape[2])
        portable_pages.unpack_tokens(layers.unbind(0), rows, values)

    def _plan_attention(
        self, row_starts: np.ndarray, context_lens: np.ndarray, page_tables: np.ndarray, *, decodes: bool
    ) -> portable_attention.AttentionPlan:
        return portable_attention.plan_attention(
            row_starts,
            context_lens,
            page_tables,
            num_kv_heads=self.problem.num_kv_heads,
            page_size=self.problem.page_size,
            head_dim=self.problem.head_dim,
            mask_dtype=self.problem.wider_dtype,
            device=self.device,
            windows=self.problem.windows,
            decodes=decodes,
        )

    def _rows(self, layers: torch.Tensor, page_table: np.ndarray, start: int, stop: int, first_head: int, num_heads: int) -> torch.Tensor:
        _, _, num_kv_heads, page_size, _ = layers.shape
        positions = np.arange(start, stop)
        heads = np.arange(first_head, first_head + num_heads)
        rows = portable_pages.slot_rows(page_table[positions // page_size], positions % page_size, heads, num_kv_heads, page_size)
        return to_device(rows, self.device)


@dataclass(frozen=True)
class _PortableStep:
    rows: torch.Tensor
    attention: portable_attention.AttentionPlan

    def append(self, k_pages: torch.Tensor, v_pages: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        portable_pages.write_rows(k_pages, self.rows, keys)
        portable_pages.write_rows(v_pages, self.rows, values)

    def attend(
        self,
        queries: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        options: AttentionOptions,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return portable_attention.ragged_paged_attention(queries, k_pages, v_pages, self.attention, options, sinks)


@dataclass(frozen=True)
class NativeOps(PortableOps):
    """The CPU's native kernels for appending and for attention; whole-pool moves, and chunks that are not bfloat16 or on a processor
    without products of it, as :class:`PortableOps`."""

    native: Native | None = None

    def plan(self, row_starts: np.ndarray, context_lens: np.ndarray, page_tables: np.ndarray) -> StepKernels:
        problem, native = self.problem, self.native
        assert native is not None
        _, rows = portable_pages.new_token_rows(row_starts, context_lens, page_tables, problem.num_kv_heads, problem.page_size)
        decodes = {window: native.plan_decode(row_starts, context_lens, page_tables, window) for window in problem.windows}
        chunks: tuple[Chunk, ...] = ()
        portable_chunks = None
        if np.diff(row_starts).max(initial=0) > 1:
            group = problem.num_heads // problem.num_kv_heads
            if native.can_attend_chunks((problem.query_dtype, problem.kv_dtype), problem.head_dim, group):
                chunks = native.plan_chunks(row_starts, context_lens, page_tables)
            else:
                portable_chunks = self._plan_attention(row_starts, context_lens, page_tables, decodes=False)
        return _NativeStep(native, torch.from_numpy(rows), decodes, chunks, portable_chunks)


@dataclass(frozen=True)
class _NativeStep:
    """Rows of one new token are in ``decodes``, by window; those with more in ``chunks`` or ``portable_chunks``."""

    native: Native
    rows: torch.Tensor
    decodes: Mapping[int | None, NativeDecodePlan | None]
    chunks: tuple[Chunk, ...]
    portable_chunks: portable_attention.AttentionPlan | None

    def append(self, k_pages: torch.Tensor, v_pages: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.native.append(k_pages, v_pages, self.rows, keys, values)

    def attend(
        self,
        queries: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        options: AttentionOptions,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(queries)
        decode = self.decodes[options.window]
        if decode is not None:
            self.native.attend(queries, k_pages, v_pages, decode, options, sinks, out)
        for chunk in self.chunks:
            self.native.attend_chunk(queries, k_pages, v_pages, chunk, options, sinks, out)
        if self.portable_chunks is not None:
            portable_attention.attend_chunks(queries, k_pages, v_pages, self.portable_chunks, options, sinks, out)
        return out


@dataclass(frozen=True)
class TritonOps:
    """Triton's kernels, for GPUs."""

    problem: Problem
    device: torch.device
    tiles: Tiles
    num_processors: int
    path: str = TRITON

    @property
    def fallbacks(self) -> Mapping[str, int]:
        return {}

    def plan(self, row_starts: np.ndarray, context_lens: np.ndarray, page_tables: np.ndarray) -> StepKernels:
        return _TritonStep(
            plan(
                row_starts,
                context_lens,
                page_tables,
                geometry=self.problem.geometry,
                tiles=self.tiles,
                windows=self.problem.windows,
                num_processors=self.num_processors,
                device=self.device,
            )
        )

    def fixed_decode(self, num_rows: int, max_context_tokens: int) -> FixedDecode | None:
        problem = self.problem
        return _FixedTriton(
            DecodePlan(
                num_rows,
                max_context_tokens,
                geometry=problem.geometry,
                tiles=self.tiles,
                windows=problem.windows,
                num_processors=self.num_processors,
                device=self.device,
            )
        )

    def pack(self, layers: torch.Tensor, page_table: np.ndarray, start: int, stop: int, first_head: int, num_heads: int) -> torch.Tensor:
        from pddkernels.kv_pages import triton as kernels

        return kernels.pack_tokens(layers, self._table(page_table), start, stop, first_head, num_heads)

    def unpack(self, layers: torch.Tensor, values: torch.Tensor, page_table: np.ndarray, start: int, first_head: int) -> None:
        from pddkernels.kv_pages import triton as kernels

        kernels.unpack_tokens(layers, values, self._table(page_table), start, first_head)

    def _table(self, page_table: np.ndarray) -> torch.Tensor:
        return to_device(np.ascontiguousarray(page_table, np.int32), self.device)


@dataclass(frozen=True)
class _TritonStep:
    step: Plan

    def append(self, k_pages: torch.Tensor, v_pages: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        from pddkernels.kv_pages import triton as kernels

        kernels.append(k_pages, v_pages, keys, values, self.step.slots, self.step.num_tokens)

    def attend(
        self,
        queries: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        options: AttentionOptions,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        from pddkernels.ragged_paged_attention import triton as kernels

        return kernels.ragged_paged_attention(queries, k_pages, v_pages, self.step, options, sinks)


@dataclass(frozen=True)
class _FixedTriton:
    decode_plan: DecodePlan

    @property
    def kernels(self) -> StepKernels:
        return _TritonStep(self.decode_plan.plan)

    def fill(self, context_lens: np.ndarray, page_tables: np.ndarray) -> None:
        self.decode_plan.fill(context_lens, page_tables)
