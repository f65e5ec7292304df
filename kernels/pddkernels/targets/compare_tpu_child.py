"""Compiles one attention kernel for :mod:`pddkernels.targets.compare_tpu`, under flags that make libtpu write its schedule."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import Mesh, PartitionSpec

from pddkernels.shapes import MODEL_SHAPES, ModelShape
from pddkernels.targets.cases import NUM_PAGES, PAGE_SIZE, PHASES, Phase
from pddkernels.targets.compare_tpu import Blocks
from pddkernels.targets.hardware import target
from pddkernels.targets.tpu import argument, attention_call, compile_for_tpu, devices, ops_for

_VMEM_LIMIT_BYTES = 96 * 2**20


def main() -> None:
    asked = json.loads(sys.argv[1])
    shape = MODEL_SHAPES[asked["model"]]
    (phase,) = [phase for phase in PHASES if phase.name == asked["phase"]]
    mesh = Mesh(devices(target(asked["target"]))[:1], ("one",))
    if asked["kernel"] == "ours":
        compile_for_tpu(*attention_call(shape, None, phase, mesh))
        sizes = ops_for(shape, phase, mesh).blocks
        assert sizes is not None
        queries = min(sizes.query_tokens, -(-phase.num_tokens // 16) * 16)
        blocks = Blocks(queries, sizes.kv_tokens // PAGE_SIZE * PAGE_SIZE, sizes.compute_tokens)
    else:
        pages, queries = asked["blocks"]
        compile_theirs(shape, phase, mesh, pages, queries)
        blocks = Blocks(queries, pages * PAGE_SIZE, pages * PAGE_SIZE)
    print(json.dumps({"queries": blocks.queries, "keys": blocks.keys, "update": blocks.update}))


def compile_theirs(shape: ModelShape, phase: Phase, mesh: Mesh, pages: int, queries: int) -> None:
    rows, width = len(phase.rows), -(-phase.max_context_tokens // PAGE_SIZE)

    def call(*arguments: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            *arguments,
            sm_scale=shape.head_dim**-0.5,
            num_kv_pages_per_block=pages,
            num_queries_per_block=queries,
            vmem_limit_bytes=_VMEM_LIMIT_BYTES,
        )

    function = jax.shard_map(call, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    arguments = (
        argument((phase.num_tokens, shape.num_heads, shape.head_dim), jnp.bfloat16, mesh),
        argument((NUM_PAGES, PAGE_SIZE, 2 * shape.num_kv_heads, shape.head_dim), jnp.bfloat16, mesh),
        argument((rows,), jnp.int32, mesh),
        argument((rows, width), jnp.int32, mesh),
        argument((rows + 1,), jnp.int32, mesh),
        argument((1,), jnp.int32, mesh),
    )
    compile_for_tpu(function, arguments)


if __name__ == "__main__":
    main()
