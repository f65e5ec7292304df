"""One model over several devices. What runs on more than one does so in a child process: the number of virtual devices is fixed when JAX
starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from pddbridge.checkpoint import open_checkpoint
from pddbridge.engine import KVBlock
from pddbridge.kv_spec import HeadRange, LayerRange, TokenRange
from pddbridge.model_spec import ModelSpec
from pddjax.engine import JaxEngine, create
from pddjax.kv import Placement
from pddjax.programs import ModelFunctions
from pddjax.sharded import split_over
from pddjax.sharding import TensorParallel, partition_specs
from pddjax.threads import environment
from pddjax.weights import load_model
from pddkernels.jax_ops import JaxOps
from tests.support.engines import CONFIG, Row, decode_greedy, prefill, random_ids, relative_error, step_of
from tests.support.kv import bits
from tests.support.specs import llama_spec
from tests.support.tiny_models import make_tiny_llama

NUM_DEVICES = 8
SMALL = replace(CONFIG, max_step_tokens=16, max_rows=2)
PERMUTED = [3, 0, 7, 1, 6, 2, 5, 4]
PAGES = [7, 2, 9, 4]


def spec_of(num_heads: int, num_kv_heads: int, head_dim: int = 4, intermediate: int = 48, vocab: int = 301) -> ModelSpec:
    return llama_spec(
        num_layers=2,
        hidden_size=32,
        intermediate_size=intermediate,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_context_tokens=128,
    )


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 4]))
def test_every_device_holds_the_kv_heads_that_its_query_heads_read(kv_scale: int, group: int, num_devices: int, dim: int) -> None:
    """Whether heads are divided among devices or copied: rows of a device are [q; k; v] of matching heads, and no query head is missing."""
    num_kv_heads = kv_scale * num_devices if kv_scale % 2 else max(1, num_devices // 2)
    num_heads = num_kv_heads * group * num_devices
    split = TensorParallel(spec_of(num_heads, num_kv_heads, dim), num_devices)
    local = split.local
    by_device = split.rows("qkv").reshape(num_devices, local.num_heads + 2 * local.num_kv_heads, dim)
    assert (by_device % dim == np.arange(dim)).all()
    heads = by_device[:, :, 0] // dim
    queries, keys, values = np.split(heads, [local.num_heads, local.num_heads + local.num_kv_heads], axis=1)
    assert queries.ravel().tolist() == list(range(num_heads))
    assert (values == keys + num_kv_heads).all()
    keys = keys - num_heads
    local_kv_head = np.arange(local.num_heads) // (local.num_heads // local.num_kv_heads)
    assert (keys[:, local_kv_head] == queries // (num_heads // num_kv_heads)).all()
    assert keys.ravel().tolist() == split.stored_heads.tolist()


def test_gate_and_up_of_one_feature_are_on_one_device() -> None:
    rows = TensorParallel(spec_of(4, 4, intermediate=12), 4).rows("gate_up")
    assert rows.tolist() == [0, 1, 2, 12, 13, 14, 3, 4, 5, 15, 16, 17, 6, 7, 8, 18, 19, 20, 9, 10, 11, 21, 22, 23]


@pytest.mark.parametrize(
    ("spec", "num_devices", "message"),
    [
        (spec_of(9, 3), 2, "num_devices: given 2, must divide num_heads=9"),
        (spec_of(8, 8, intermediate=42), 4, "num_devices: given 4, must divide intermediate_size=42"),
        (spec_of(12, 3), 2, "num_devices: given 2, must divide num_kv_heads=3 or be a multiple of it"),
        (spec_of(4, 4), 0, "num_devices: given 0, allowed 1 or more"),
    ],
)
def test_a_number_of_devices_that_does_not_divide_is_refused(spec: ModelSpec, num_devices: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorParallel(spec, num_devices)


def test_a_parameter_without_a_rule_is_refused_by_name() -> None:
    class Odd(nnx.Module):
        def __init__(self) -> None:
            self.router = nnx.Param(jnp.zeros((2, 2)))

    with pytest.raises(ValueError, match=r"no rule for parameter router"):
        partition_specs(Odd())


def test_more_devices_than_there_are_and_a_split_the_other_engine_lacks_are_refused(tmp_path: Path) -> None:
    model_dir = make_tiny_llama(tmp_path / "model", num_layers=1)
    with pytest.raises(ValueError, match=r"num_devices: given 64, cpu has \d+"):
        create(str(model_dir), replace(SMALL, num_devices=64))
    from pddtorch.engine import create as create_torch

    with pytest.raises(ValueError, match="num_devices: given 2, this engine uses 1"):
        create_torch(str(model_dir), replace(SMALL, num_devices=2))


def test_a_worker_on_cpus_gets_the_devices_it_asks_for() -> None:
    code = "import jax; print(len(jax.devices()))"
    asked = os.environ | environment(1, "cpu", 3)
    assert subprocess.run([sys.executable, "-c", code], env=asked, capture_output=True, text=True, check=True).stdout.strip() == "3"


class Case(NamedTuple):
    num_heads: int
    num_kv_heads: int
    num_devices: int
    order: list[int] | None
    tie: bool
    bias: bool


# Fewer KV heads than devices, devices in an odd order, a vocabulary that does not divide, biases. Then a KV head a device; each head on
# four devices; three devices and tied embeddings.
CASES = (
    Case(8, 4, 8, PERMUTED, False, True),
    Case(16, 8, 8, PERMUTED, False, False),
    Case(8, 2, 8, None, False, True),
    Case(9, 3, 3, None, True, False),
)


def engine_over(model_dir: Path, case: Case, kv_dtype: str) -> JaxEngine:
    config = replace(SMALL, num_devices=case.num_devices, kv_dtype=kv_dtype)
    if case.order is None:
        return create(str(model_dir), config)
    checkpoint = open_checkpoint(model_dir)
    devices = [jax.devices()[i] for i in case.order]
    local = TensorParallel(checkpoint.spec, case.num_devices).local
    ops = JaxOps("portable", jnp.dtype(kv_dtype), local.num_kv_heads, local.head_dim)
    functions, placement = split_over(devices, checkpoint, jnp.dtype("float32"), ops, config.max_context_tokens)
    return JaxEngine(checkpoint.spec, config, checkpoint.weights_digest(), functions, placement)


def check_streams(whole: JaxEngine, split: JaxEngine, num_kv_heads: int) -> None:
    """The same greedy tokens, logits and KV, up to the order of sums; no compilation after the warm-up."""
    split.warm_up(lambda done, total, what: None)
    compiled = split.stats().compilations
    ids = random_ids(3, 21)
    for engine in (whole, split):
        prefill(engine, ids[:-1], PAGES, chunks=(9, 5))
    last = step_of(Row(ids[-1:], len(ids) - 1, PAGES))
    assert relative_error(split.logits(last), whole.logits(last)) < 1e-5
    tokens = decode_greedy(whole, ids, PAGES, 8)
    assert len(set(tokens)) > 2
    assert decode_greedy(split, ids, PAGES, 8) == tokens
    table, tokens_stored = np.array(PAGES, np.int32), TokenRange(0, 28)
    for mine, want in zip(split.read_kv(table, tokens_stored), whole.read_kv(table, tokens_stored), strict=True):
        assert mine.values.shape == (2, 28, num_kv_heads, 4)
        assert relative_error(mine.values, want.values) < 1e-5
    assert split.stats().compilations == compiled


def check_export(engine: JaxEngine, num_kv_heads: int, kv_dtype: str) -> None:
    """Case 21: what is written, whole or by heads, is what is read, bit for bit and in the order of heads; a page's copy is the page."""
    rng = np.random.default_rng(5)
    table, tokens, layers = np.array(PAGES, np.int32), TokenRange(3, 29), LayerRange(0, 2)
    shape = (2, len(tokens), num_kv_heads, 4)
    dtype = engine.kv_spec.np_dtype
    wanted = {plane: rng.standard_normal(shape).astype(dtype) for plane in ("k", "v")}
    for plane, values in wanted.items():
        engine.write_kv(table, KVBlock(plane, layers, tokens, HeadRange(0, num_kv_heads), values))
    one = HeadRange(1, 2)
    wanted["v"][:, :, 1:2] = fresh = rng.standard_normal((2, len(tokens), 1, 4)).astype(dtype)
    engine.write_kv(table, KVBlock("v", layers, tokens, one, fresh))
    for block in engine.read_kv(table, tokens):
        assert block.values.dtype == dtype
        assert np.array_equal(bits(block.values), bits(wanted[block.plane])), kv_dtype
    engine.copy_page(PAGES[1], 0)
    k, _ = engine.read_kv(np.array([0], np.int32), TokenRange(0, 8))
    assert np.array_equal(bits(k.values), bits(wanted["k"][:, 5:13]))


def check_int8(model_dir: Path, case: Case) -> None:
    """Rounded weights are split with their scales. Computed in float32, so that nothing but the order of sums differs."""
    checkpoint, devices = open_checkpoint(model_dir), [jax.devices()[i] for i in case.order or range(case.num_devices)]
    dtype, context = jnp.dtype("float32"), SMALL.max_context_tokens
    local = TensorParallel(checkpoint.spec, case.num_devices).local
    ops = JaxOps("portable", dtype, local.num_kv_heads, local.head_dim)
    functions, placement = split_over(devices, checkpoint, dtype, ops, context, int8=True)
    in_int8 = [leaf for leaf in functions.leaves if leaf.dtype == jnp.int8]
    assert len(in_int8) == 4 * checkpoint.spec.num_layers + 1
    for leaf in in_int8:
        assert {shard.data.size * case.num_devices for shard in leaf.addressable_shards} == {leaf.size}
    split = JaxEngine(checkpoint.spec, replace(SMALL, num_devices=case.num_devices), "", functions, placement)
    whole_ops = JaxOps("portable", dtype, case.num_kv_heads, 4)
    model = load_model(checkpoint, dtype, context, jax.devices()[0], int8=True)
    whole = JaxEngine(checkpoint.spec, SMALL, "", ModelFunctions(model, whole_ops), Placement.on_one(jax.devices()[0], whole_ops))
    ids = random_ids(4, 15)
    last = step_of(Row(ids[-1:], 14, PAGES))
    for engine in (whole, split):
        prefill(engine, ids[:-1], PAGES)
    assert relative_error(split.logits(last), whole.logits(last)) < 1e-5
    stored = create(str(model_dir), SMALL)
    prefill(stored, ids[:-1], PAGES)
    assert relative_error(whole.logits(last), stored.logits(last)) > 1e-3, "nothing was rounded"


def main(root: Path, case: Case) -> None:
    assert len(jax.devices()) == NUM_DEVICES
    model_dir = make_tiny_llama(
        root / "model",
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=4,
        num_layers=2,
        hidden=32,
        vocab=301,
        tie=case.tie,
        attention_bias=case.bias,
        mlp_bias=case.bias,
    )
    whole, split = create(str(model_dir), SMALL), engine_over(model_dir, case, "float32")
    check_streams(whole, split, case.num_kv_heads)
    check_export(split, case.num_kv_heads, "float32")
    check_export(engine_over(model_dir, case, "bfloat16"), case.num_kv_heads, "bfloat16")
    check_int8(model_dir, case)
    print("equal")


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, len(CASES)))])
def test_a_split_engine_is_the_whole_one(tmp_path: Path, number: int) -> None:
    root = Path(__file__).parents[3]
    asked = {**os.environ, **environment(2, "cpu", NUM_DEVICES), "PYTHONPATH": str(root)}
    ended = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(number)], env=asked, capture_output=True, text=True, timeout=250, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "equal\n"), ended.stderr[-3000:]


if __name__ == "__main__":
    main(Path(sys.argv[1]), CASES[int(sys.argv[2])])
