"""KV as JAX has it, against the bridge's reading of it. Case 21: heads sharded over devices in any order; and JAX's own attention
reads what the bridge wrote in the layout that is named after it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool, write_block
from pddbridge.kv_layout import interleaved_heads
from pddbridge.kv_layout_catalogue import tpu_ragged
from pddbridge.kv_shards import read_shards
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from tests.support.kv import bits, fill_slowly, random_planes

NUM_DEVICES = 8


def check_export(spec: KVSpec, order: list[int], replicas: int) -> None:
    """KV of ``spec`` on a mesh whose devices stand in ``order``, each piece of heads on ``replicas`` of them."""
    tokens, table = TokenRange(0, 21), np.array([3, 1, 4])
    planes = random_planes(spec, tokens.stop, 11)
    num_heads = spec.groups[0].planes[0].num_heads
    layout = interleaved_heads(8, spec.dtype)
    whole = KVPool.zeros(layout, spec, 5)
    fill_slowly(whole, table, planes, LayerRange(0, spec.num_layers), tokens, HeadRange(0, num_heads))

    devices = np.array(jax.devices())[order].reshape(-1, replicas)
    sharding = NamedSharding(Mesh(devices, ("heads", "copies")), PartitionSpec(None, None, "heads", None))
    placed = [jax.device_put(arrays[0], sharding).addressable_shards for arrays in whole.arrays]
    layers = [sorted(shards, key=lambda shard: shard.device.id) for shards in placed]
    pools = []
    for by_layer in zip(*layers, strict=True):  # one device after the other
        rows = by_layer[0].index[2]
        start, stop = rows.start or 0, rows.stop or 2 * num_heads
        heads = HeadRange(start // 2, stop // 2)
        pools.append(KVPool(replace(layout, heads=heads), spec, tuple((np.asarray(shard.data),) for shard in by_layer)))
    starts = [pool.layout.heads.start for pool in pools if pool.layout.heads is not None]
    assert len(starts) == NUM_DEVICES
    assert (starts == sorted(starts)) == (order == sorted(order))
    for plane, values in planes.items():
        exported = [block for block in read_shards(pools, table, tokens) if block.plane == plane]
        assert len(exported) == NUM_DEVICES // replicas
        assert np.array_equal(bits(np.concatenate([block.values for block in exported], axis=2)), bits(values))


def main() -> None:
    assert len(jax.devices()) == NUM_DEVICES
    for order in (list(range(8)), [3, 0, 7, 1, 6, 2, 5, 4], [7, 6, 5, 4, 3, 2, 1, 0]):
        check_export(KVSpec.gqa(2, 8, 4, "float32"), order, 1)
        check_export(KVSpec.gqa(2, 2, 4, "float32"), order, 4)
        check_export(KVSpec.gqa(1, 16, 4, "bfloat16"), order, 2)
    print("exported")


def test_case_21_heads_sharded_over_devices_in_any_order() -> None:
    """In a process of its own: the number of virtual devices is fixed when JAX starts."""
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={NUM_DEVICES}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(root),
    }
    ended = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert (ended.returncode, ended.stdout) == (0, "exported\n"), ended.stderr[-2000:]


@pytest.mark.parametrize(("head_dim", "num_tokens"), [(128, 21), (128, 1), (64, 24)])
def test_jaxs_ragged_paged_attention_reads_what_the_bridge_wrote(head_dim: int, num_tokens: int) -> None:
    """The last query attends to all of a prompt's KV; a smaller dim is padded with zeros, in the query as well."""
    spec = KVSpec.gqa(1, 2, head_dim, "float32")
    rng = np.random.default_rng(4)
    k, v = (rng.standard_normal((1, num_tokens, 2, head_dim)).astype(np.float32) for _ in range(2))
    pool = KVPool.zeros(tpu_ragged(8, "float32"), spec, 6)
    table = np.array([5, 2, 3], np.int32)
    for name, values in (("k", k), ("v", v)):
        write_block(pool, table, KVBlock(name, LayerRange(0, 1), TokenRange(0, num_tokens), HeadRange(0, 2), values))
    query = rng.standard_normal((1, 4, head_dim)).astype(np.float32)
    padded = np.zeros((1, 4, 128), np.float32)
    padded[..., :head_dim] = query
    answer = ref_ragged_paged_attention(
        jnp.asarray(padded),
        jnp.asarray(pool.arrays[0][0]),
        jnp.asarray([num_tokens], jnp.int32),
        jnp.asarray(table[None]),
        jnp.asarray([0, 1], jnp.int32),
        jnp.asarray([1], jnp.int32),
    )
    for head in range(4):
        scores = k[0, :, head // 2].astype(np.float64) @ query[0, head]
        weights = np.exp(scores - scores.max())
        want = weights / weights.sum() @ v[0, :, head // 2]
        assert np.allclose(np.asarray(answer)[0, head, :head_dim], want, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    main()
