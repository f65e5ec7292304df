"""Pallas kernels compiled by libtpu for TPUs that are not here.

A topology stands for the absent chips: its devices carry shardings of arguments that are shapes only. Everything is traced under a mesh of
such devices, which is how Pallas learns what chip it compiles for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pddkernels.jax_ops import JaxOps, choose
from pddkernels.mla_decode.pallas import mla_attention
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.ragged_paged_attention.pallas import padded_dim
from pddkernels.shapes import MLA_SHAPES, MODEL_SHAPES, MLAShape, ModelShape
from pddkernels.targets.cases import DECODE, NUM_PAGES, PAGE_SIZE, PHASES, PREFILL, Phase
from pddkernels.targets.hardware import Target
from pddkernels.targets.report import Case, Compiled, Memory
from pddkernels.targets.work import Work, attention, copy, latent_attention

_WHOLE: Final = PartitionSpec()
_KERNEL_CALL: Final = 'custom_call_target="tpu_custom_call"'
_ALL_REDUCE: Final = re.compile(r" all-reduce(?:-start)?\(")


def devices(target: Target) -> np.ndarray:
    """The slice's devices [num_devices]: none of them is here."""
    assert target.topology is not None, target
    found = topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices
    return np.array(found)[: target.num_devices]


def compile_for_tpu(function: Callable[..., object], arguments: tuple[object, ...], donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """``arguments``: shapes with shardings over devices of :func:`devices`. Raises whatever the compiler raises."""
    return jax.jit(function, donate_argnums=donate).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def facts(compiled: jax.stages.Compiled, work: Work) -> Compiled:
    """What libtpu says of it. Its own FLOPs and bytes leave out kernels, which it cannot see into, and count a loop's body once."""
    memory = compiled.memory_analysis()
    cost = _cost(compiled)
    return Compiled(
        work,
        Memory(memory.argument_size_in_bytes, memory.temp_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes),
        compiler_flops=cost.get("flops"),
        compiler_bytes=cost.get("bytes accessed"),
        instructions=_instructions(compiled),
    )


def cases(target: Target, small: bool) -> list[Case]:
    """Every operation at every shape; with ``small`` each at one. Named by operation, model and phase."""
    mesh = Mesh(devices(target)[:1], ("one",))
    models = {"llama-3.1-8b": MODEL_SHAPES["llama-3.1-8b"]} if small else MODEL_SHAPES
    found = []
    for model, shape in models.items():
        for window in dict.fromkeys(shape.windows):
            for phase in (PREFILL, DECODE) if small else PHASES:
                seen = "" if window is None else f", window {window}"
                found.append(
                    Case("kernel", f"ragged_paged_attention: {model}, {phase.name}{seen}", partial(_attention, shape, window, phase, mesh))
                )
        for operation, compile_it in (("append", _append), ("read", _read), ("write", _write)):
            found.append(Case("kernel", f"kv_pages.{operation}: {model}, {PREFILL.num_tokens} tokens", partial(compile_it, shape, mesh)))
    for model, latent_shape in () if small else MLA_SHAPES.items():
        found.append(Case("kernel", f"mla_decode: {model}, {DECODE.name}", partial(_latents, latent_shape, mesh)))
    return found


def ops_for(shape: ModelShape, phase: Phase, mesh: Mesh) -> JaxOps:
    """The operations that the engine would choose on such a device. Raises ValueError where those are no kernels."""
    ops = choose(
        mesh.devices.flat[0],
        num_heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kv_dtype=jnp.dtype(jnp.bfloat16),
        max_rows=len(phase.rows),
        pages_per_row=_pages_per_row(phase),
    )
    if ops.fallbacks:
        raise ValueError(f"no kernel for this device: {', '.join(ops.fallbacks)}")
    return ops


def argument(shape: tuple[int, ...], dtype: jnp.dtype | type, mesh: Mesh, axes: PartitionSpec = _WHOLE) -> jax.ShapeDtypeStruct:
    """An argument that is a shape only, split over ``mesh`` by ``axes``."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, axes))


def attention_call(shape: ModelShape, window: int | None, phase: Phase, mesh: Mesh) -> tuple[Callable[..., object], tuple[object, ...]]:
    """The engine's attention in ``phase`` and its arguments; a step of one new token per row is a decode step."""
    ops = ops_for(shape, phase, mesh)
    rows = len(phase.rows)
    sinks = (argument((shape.num_heads,), jnp.float32, mesh),) if shape.sinks else ()
    operands = (
        argument((phase.num_tokens, shape.num_heads, shape.head_dim), jnp.bfloat16, mesh),
        _pages(ops, mesh),
        argument((rows, _pages_per_row(phase)), jnp.int32, mesh),
    )
    options = AttentionOptions(shape.head_dim**-0.5, window, shape.soft_cap)
    if phase.num_tokens == rows:
        counts = argument((rows,), jnp.int32, mesh)
        return _on_one_device(
            lambda q, kv, tables, lens, new, *sinks: ops.attend_decode(q, kv, tables, lens, new, options, *sinks), mesh
        ), (
            *operands,
            counts,
            counts,
            *sinks,
        )
    planned = ops.plan(np.zeros(1, np.int32), np.zeros(0, np.int32), phase.num_tokens, rows)
    plan = tuple(argument(array.shape, array.dtype, mesh) for array in planned)
    return _on_one_device(lambda q, kv, tables, plan, *sinks: ops.attend(q, kv, tables, plan, options, *sinks), mesh), (
        *operands,
        plan,
        *sinks,
    )


def _attention(shape: ModelShape, window: int | None, phase: Phase, mesh: Mesh) -> Compiled:
    work = attention(phase.rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, window)
    return facts(compile_for_tpu(*attention_call(shape, window, phase, mesh)), work)


def _latents(shape: MLAShape, mesh: Mesh) -> Compiled:
    rows, num_tokens = len(DECODE.rows), DECODE.num_tokens
    dims = (shape.latent_dim, padded_dim(shape.rope_dim))
    arguments = (
        *(argument((num_tokens, shape.num_heads, dim), jnp.bfloat16, mesh) for dim in (shape.latent_dim, shape.rope_dim)),
        *(argument((NUM_PAGES, PAGE_SIZE, dim), jnp.bfloat16, mesh) for dim in dims),
        *(argument(size, jnp.int32, mesh) for size in ((rows + 1,), (rows,), (rows, _pages_per_row(DECODE)), (1,))),
    )
    work = latent_attention(DECODE.rows, shape.num_heads, shape.latent_dim, shape.rope_dim)
    return facts(compile_for_tpu(_on_one_device(partial(mla_attention, scale=shape.scale), mesh), arguments), work)


def _append(shape: ModelShape, mesh: Mesh) -> Compiled:
    ops = ops_for(shape, PREFILL, mesh)
    new = argument((PREFILL.num_tokens, shape.num_kv_heads, shape.head_dim), jnp.bfloat16, mesh)
    arguments = (_pages(ops, mesh), new, new, argument((PREFILL.num_tokens,), jnp.int32, mesh))
    return facts(compile_for_tpu(_on_one_device(ops.append, mesh), arguments, donate=(0,)), _moved(shape))


def _read(shape: ModelShape, mesh: Mesh) -> Compiled:
    ops = ops_for(shape, PREFILL, mesh)
    arguments = (_pages(ops, mesh), argument((PREFILL.num_tokens,), jnp.int32, mesh))
    return facts(compile_for_tpu(_on_one_device(ops.read, mesh), arguments), _moved(shape))


def _write(shape: ModelShape, mesh: Mesh) -> Compiled:
    ops = ops_for(shape, PREFILL, mesh)
    stored = argument((PREFILL.num_tokens, shape.num_kv_heads, shape.head_dim), ops.storage_dtype, mesh)
    wanted = argument((2 * shape.num_kv_heads,), jnp.bool_, mesh)
    arguments = (_pages(ops, mesh), stored, wanted, argument((PREFILL.num_tokens,), jnp.int32, mesh))
    return facts(compile_for_tpu(_on_one_device(ops.write, mesh), arguments, donate=(0,)), _moved(shape))


def _moved(shape: ModelShape) -> Work:
    return copy(2 * PREFILL.num_tokens * shape.num_kv_heads * shape.head_dim)


def _pages(ops: JaxOps, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return argument((NUM_PAGES, PAGE_SIZE, *ops.token_shape), ops.storage_dtype, mesh)


def _pages_per_row(phase: Phase) -> int:
    return -(-phase.max_context_tokens // PAGE_SIZE)


def _on_one_device(function: Callable[..., object], mesh: Mesh) -> Callable[..., object]:
    """``function`` traced where Pallas can see what chip it is for."""
    wrapped: Callable[..., object] = jax.shard_map(function, mesh=mesh, in_specs=_WHOLE, out_specs=_WHOLE, check_vma=False)
    return wrapped


def _instructions(compiled: jax.stages.Compiled) -> dict[str, int] | None:
    """None where jaxlib cannot read back what libtpu made of the program: it does not know every form of an asynchronous instruction."""
    try:
        program = compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None
    return {"kernel_calls": program.count(_KERNEL_CALL), "all_reduces": len(_ALL_REDUCE.findall(program))}


def _cost(compiled: jax.stages.Compiled) -> Mapping[str, float]:
    """Empty where libtpu gives none, as for a program that is one kernel."""
    return compiled.cost_analysis() or {}
