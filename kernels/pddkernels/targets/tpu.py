"""Pallas kernels compiled by libtpu for TPUs that are not here.

A topology stands for the absent chips: its devices carry shardings of arguments that are shapes only. Everything is traced under a mesh of
such devices, which is how Pallas learns what chip it compiles for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pddkernels.ragged_paged_attention.block_sizes import block_sizes, generation_of
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.ragged_paged_attention.pallas import padded_dim, ragged_paged_attention
from pddkernels.shapes import MODEL_SHAPES, ModelShape
from pddkernels.targets.cases import NUM_PAGES, PAGE_SIZE, PHASES, PREFILL, Phase
from pddkernels.targets.hardware import Target
from pddkernels.targets.report import Case, Compiled, Memory
from pddkernels.targets.work import Work, attention

_WHOLE = PartitionSpec()


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
    )


def cases(target: Target, small: bool) -> list[Case]:
    """Every kernel at every shape; with ``small`` each kernel at one. Named by kernel, model and phase."""
    mesh = Mesh(devices(target)[:1], ("one",))
    models = {"llama-3.1-8b": MODEL_SHAPES["llama-3.1-8b"]} if small else MODEL_SHAPES
    phases = (PREFILL,) if small else PHASES
    found = []
    for model, shape in models.items():
        for window in dict.fromkeys(shape.windows):
            for phase in phases:
                seen = "" if window is None else f", window {window}"
                found.append(
                    Case("kernel", f"ragged_paged_attention: {model}{seen}, {phase.name}", partial(_attention, shape, window, phase, mesh))
                )
    return found


def attention_arguments(shape: ModelShape, phase: Phase, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """queries, pages, row_starts, context_lens, page_tables, num_rows of the kernel, on every device of ``mesh``."""
    rows, width = len(phase.rows), -(-phase.max_context_tokens // PAGE_SIZE)
    return (
        argument((phase.num_tokens, shape.num_heads, shape.head_dim), jnp.bfloat16, mesh),
        argument((NUM_PAGES, PAGE_SIZE, 2 * shape.num_kv_heads, padded_dim(shape.head_dim)), jnp.bfloat16, mesh),
        argument((rows + 1,), jnp.int32, mesh),
        argument((rows,), jnp.int32, mesh),
        argument((rows, width), jnp.int32, mesh),
        argument((1,), jnp.int32, mesh),
    )


def argument(shape: tuple[int, ...], dtype: jnp.dtype | type, mesh: Mesh, axes: PartitionSpec = _WHOLE) -> jax.ShapeDtypeStruct:
    """An argument that is a shape only, split over ``mesh`` by ``axes``."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, axes))


def on_one_device(function: Callable[..., object], mesh: Mesh) -> Callable[..., object]:
    """``function`` traced where Pallas can see what chip it is for."""
    wrapped: Callable[..., object] = jax.shard_map(function, mesh=mesh, in_specs=_WHOLE, out_specs=_WHOLE, check_vma=False)
    return wrapped


def _attention(shape: ModelShape, window: int | None, phase: Phase, mesh: Mesh) -> Compiled:
    generation = generation_of(mesh.devices.flat[0].device_kind)
    assert generation is not None, mesh
    token_bytes = 2 * shape.num_kv_heads * padded_dim(shape.head_dim) * jnp.dtype(jnp.bfloat16).itemsize
    options = AttentionOptions(shape.head_dim**-0.5, window, shape.soft_cap)
    kernel = partial(
        ragged_paged_attention, options=options, blocks=block_sizes(generation, num_heads=shape.num_heads, token_bytes=token_bytes)
    )
    arguments = attention_arguments(shape, phase, mesh)
    if shape.sinks:
        arguments = (*arguments, argument((shape.num_heads,), jnp.float32, mesh))
        function = on_one_device(lambda *given: kernel(*given[:-1], sinks=given[-1]), mesh)
    else:
        function = on_one_device(kernel, mesh)
    work = attention(phase.rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, window)
    return facts(compile_for_tpu(function, arguments), work)


def _cost(compiled: jax.stages.Compiled) -> Mapping[str, float]:
    """Empty where libtpu gives none, as for a program that is one kernel."""
    return compiled.cost_analysis() or {}
