"""``python -m pddjax.aot --target tpu-v5e``: whole engine steps of real-size models, compiled by libtpu for a slice that is not here.

The programs are the engine's own; weights, pages and batches are shapes only. JSON lines as :mod:`pddkernels.targets.report` has them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pddbridge.draw_plan import DrawArrays, draw_plan
from pddbridge.engine import EngineConfig
from pddbridge.engine_checks import INT8
from pddbridge.model_spec import ModelSpec, plain_spec
from pddbridge.rope import RopeSpec
from pddjax.batch import DecodeBatch, RaggedBatch, empty_decode, empty_ragged
from pddjax.draw import draw
from pddjax.programs import ModelFunctions
from pddjax.sharded import ShardedFunctions
from pddjax.sharding import AXIS, LOGITS, PAGES, REPLICATED, TensorParallel, global_leaves, partition_specs, shard_of
from pddkernels.jax_ops import JaxOps, choose
from pddkernels.shapes import MODEL_SHAPES, ModelShape
from pddkernels.targets.cases import DECODE, PREFILL, Phase
from pddkernels.targets.hardware import TARGETS, Target, target
from pddkernels.targets.report import Case, Compiled, compile_all
from pddkernels.targets.tpu import argument, compile_for_tpu, devices, facts
from pddkernels.targets.work import Work, step

# The largest of the named models that leaves its slice room for much KV, and in int8 what only so leaves it any.
_MODELS: Final = {
    "tpu-v5e": (("llama-3.1-8b", "bfloat16"), ("llama-3.1-8b", INT8), ("llama-3.1-70b", INT8)),
    "tpu-v6e": (("qwen3-32b", "bfloat16"), ("qwen3-32b", INT8)),
    "tpu-v5p": (("llama-3.1-70b", "bfloat16"), ("llama-3.1-70b", INT8)),
}
_DTYPE: Final = jnp.dtype("bfloat16")  # of activations, KV and the weights that are not in int8
COMPUTE_DTYPES: Final = ("bfloat16", INT8)
_PAGE_SIZE: Final = 128  # a device keeps one KV head of eight: 64 KiB a page, worth a copy
_MAX_CONTEXT: Final = 32768
# Of the chip's memory, for weights and KV pages; the rest is for activations, programs and the runtime.
_SHARE: Final = 0.85


@dataclass(frozen=True)
class Setup:
    """One model over one slice: the engine's functions and the shapes they are compiled for."""

    config: EngineConfig
    ops: JaxOps
    functions: ShardedFunctions
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    pages: list[jax.ShapeDtypeStruct]
    mesh: Mesh


def cases(chosen: Target, compute_dtypes: Collection[str]) -> list[Case]:
    """A prefill chunk of 2,048 tokens, decode of 64 rows, the head of 64 rows and, without int8, drawing 64 tokens, for each of the
    target's models in ``compute_dtypes``.
    """
    mesh = Mesh(devices(chosen), (AXIS,))
    found = []
    for model, compute_dtype in _MODELS[chosen.name]:
        if compute_dtype not in compute_dtypes:
            continue
        shape = MODEL_SHAPES[model]
        setup = set_up(model, compute_dtype, chosen, mesh)
        kv_tokens = setup.config.num_pages * _PAGE_SIZE
        name = f"{model}, int8 weights" if compute_dtype == INT8 else model
        for phase, compile_it in ((PREFILL, _prefill), (DECODE, _decode)):
            what = f"step: {name}, {phase.name}, KV pool of {kv_tokens:,} tokens"
            found.append(Case("step", what, partial(compile_it, setup, shape, phase), chosen.num_devices))
        found.append(Case("step", f"head: {name}, {len(DECODE.rows)} rows", partial(_head, setup, shape), chosen.num_devices))
        if compute_dtype != INT8:  # the logits are the same
            found.append(Case("step", f"draw: {name}, {len(DECODE.rows)} rows", partial(_draw, shape, mesh), chosen.num_devices))
    return found


def set_up(model: str, compute_dtype: str, chosen: Target, mesh: Mesh) -> Setup:
    """The named model over all devices of ``mesh``, with as many KV pages as ``_SHARE`` of the chip's memory leaves.

    Raises ValueError where the engine would not run its kernels on such a device.
    """
    spec = spec_of(model)
    split = TensorParallel(spec, mesh.size)
    shard = shard_of(split, _DTYPE, _MAX_CONTEXT, int8=compute_dtype == INT8)
    leaves = tuple(global_leaves(split, shard, mesh))
    ops = choose(
        mesh.devices.flat[0],
        num_heads=split.local.num_heads,
        kv_heads=split.local.num_kv_heads,
        head_dim=spec.head_dim,
        kv_dtype=_DTYPE,
        max_rows=len(DECODE.rows),
        pages_per_row=_MAX_CONTEXT // _PAGE_SIZE,
    )
    if ops.fallbacks:
        raise ValueError(f"{model} on {chosen.name}: no kernels: {', '.join(ops.fallbacks)}")
    weights_bytes = sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)
    planes, dim = ops.token_shape
    page_bytes = spec.num_layers * _PAGE_SIZE * planes * dim * ops.storage_dtype.itemsize
    num_pages = int((_SHARE * chosen.chip.memory_bytes - weights_bytes) // page_bytes)
    config = EngineConfig(
        device="tpu",
        compute_dtype=compute_dtype,
        kv_dtype=_DTYPE.name,
        page_size=_PAGE_SIZE,
        num_pages=num_pages,
        max_context_tokens=_MAX_CONTEXT,
        max_step_tokens=PREFILL.num_tokens,
        max_rows=len(DECODE.rows),
        num_threads=1,
        compile_cache_dir=None,
        num_devices=mesh.size,
    )
    functions = ShardedFunctions(split, ModelFunctions(shard, ops), (), partition_specs(shard), mesh)
    layer = argument((num_pages, _PAGE_SIZE, mesh.size * planes, dim), ops.storage_dtype, mesh, PAGES)
    return Setup(config, ops, functions, leaves, [layer] * spec.num_layers, mesh)


def spec_of(model: str) -> ModelSpec:
    """What a step's program depends on; constants such as RoPE's base do not change what is compiled."""
    shape = MODEL_SHAPES[model]
    spec = plain_spec(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_context_tokens=_MAX_CONTEXT,
        rms_norm_eps=1e-5,
        rope=RopeSpec(500_000.0),
        tie_embeddings=False,
    )
    return replace(spec, qk_norm=model.startswith("qwen3"))


def _prefill(setup: Setup, shape: ModelShape, phase: Phase) -> Compiled:
    batch = empty_ragged(setup.config, phase.num_tokens, setup.ops)
    return _step(setup, setup.functions.ragged, batch, step(phase.rows, shape, 0, setup.mesh.size, _weight_itemsize(setup)))


def _decode(setup: Setup, shape: ModelShape, phase: Phase) -> Compiled:
    batch = empty_decode(setup.config, len(phase.rows))
    return _step(setup, setup.functions.decode, batch, step(phase.rows, shape, 0, setup.mesh.size, _weight_itemsize(setup)))


def _weight_itemsize(setup: Setup) -> int:
    return 1 if setup.config.compute_dtype == INT8 else _DTYPE.itemsize


def _step(setup: Setup, function: Callable[..., object], batch: DecodeBatch | RaggedBatch, work: Work) -> Compiled:
    shapes = jax.tree.map(lambda array: argument(array.shape, array.dtype, setup.mesh, REPLICATED), batch)
    return facts(compile_for_tpu(function, (setup.leaves, setup.pages, shapes), donate=(1,)), work)


def _head(setup: Setup, shape: ModelShape) -> Compiled:
    num_rows = len(DECODE.rows)
    hidden = argument((shape.hidden_size, num_rows), _DTYPE, setup.mesh, REPLICATED)
    weights = shape.vocab_size * shape.hidden_size / setup.mesh.size
    work = Work(2.0 * num_rows * weights, weights * _weight_itemsize(setup))
    return facts(compile_for_tpu(lambda leaves, hidden: setup.functions.head(leaves, hidden, num_rows), (setup.leaves, hidden)), work)


def _draw(shape: ModelShape, mesh: Mesh) -> Compiled:
    """No matrix products: a pass over the logits, split on the vocabulary, is the least."""
    num_rows = len(DECODE.rows)

    def row(dtype: np.dtype | type) -> jax.ShapeDtypeStruct:
        return argument((num_rows,), dtype, mesh, REPLICATED)

    logits = argument((shape.vocab_size, num_rows), jnp.float32, mesh, LOGITS)
    plan = DrawArrays(*(row(values.dtype) for values in draw_plan((), (), shape.vocab_size, 0.0, num_rows).arrays))
    with jax.enable_x64(True):
        compiled = compile_for_tpu(draw, (logits, row(np.float32), row(np.int32), plan))
    return facts(compiled, Work(0.0, shape.vocab_size * num_rows * 4 / mesh.size))


def main() -> None:
    parser = argparse.ArgumentParser(description="compile whole engine steps for one TPU target")
    parser.add_argument("--target", required=True, choices=sorted(name for name, known in TARGETS.items() if known.topology))
    parser.add_argument("--first", type=int, default=0, help="leave out the cases before this one")
    parser.add_argument("--compute-dtype", choices=COMPUTE_DTYPES, action="append", help="leave out the other; may be given twice")
    arguments = parser.parse_args()
    chosen = target(arguments.target)
    compile_all(chosen, cases(chosen, arguments.compute_dtype or COMPUTE_DTYPES), arguments.first)


if __name__ == "__main__":
    main()
