"""The dispatch point: which path a device gets, and that an engine is the same engine on either. Kernels are interpreted, hence the tiny
shapes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from pddbridge.kv_spec import TokenRange
from pddjax.engine import JaxEngine, create
from pddkernels.jax_ops import JaxOps, choose
from pddkernels.ragged_paged_attention.block_sizes import BlockSizes, block_sizes
from tests.support.engines import CONFIG, Row, decode_greedy, prefill, random_ids, step_of
from tests.support.kv import bits
from tests.support.tiny_models import make_tiny_llama

SMALL = replace(CONFIG, max_step_tokens=16, max_rows=2, page_size=6)
BLOCKS = BlockSizes(query_tokens=16, kv_tokens=12, compute_tokens=128, vmem_limit_bytes=2**26)


def on_kernels(*_: object, kv_heads: int, head_dim: int, kv_dtype: jnp.dtype, **__: object) -> JaxOps:
    return JaxOps("pallas", kv_dtype, kv_heads, head_dim, BLOCKS, interpret=True)


def engines(path: Path, kv_dtype: str, num_layers: int = 1) -> tuple[JaxEngine, JaxEngine]:
    """The same model, three KV heads and head_dim 16, which kernels store as four heads of 128 values."""
    model_dir = str(make_tiny_llama(path, num_layers=num_layers, num_heads=6, num_kv_heads=3, head_dim=16, hidden=32))
    config = replace(SMALL, kv_dtype=kv_dtype)
    return create(model_dir, config), create(model_dir, config, on_kernels)


def test_an_engine_on_kernels_is_the_same_engine(tmp_path: Path) -> None:
    """Chunks, an extend beside a decode row, decode over page boundaries: greedy tokens and stored KV as on the portable path."""
    portable, kernels = engines(tmp_path / "model", "float32")
    ids, other = random_ids(5, 20), random_ids(6, 9)
    pages, other_pages = [7, 2, 9, 4, 3, 11], [5, 1, 8]
    logits = []
    for engine in (portable, kernels):
        prefill(engine, ids[:-1], pages, chunks=(13, 6))
        prefill(engine, other[:3], other_pages)
        both = step_of(Row(ids[-1:], len(ids) - 1, pages), Row(other[3:], 3, other_pages))
        logits.append(engine.logits(both))
    assert np.abs(logits[0] - logits[1]).max() < 1e-4 * np.abs(logits[0]).max()
    tokens = decode_greedy(portable, ids, pages, 6)
    assert len(set(tokens)) > 2
    assert decode_greedy(kernels, ids, pages, 6) == tokens

    table = np.array(pages, np.int32)
    for got, want in zip(kernels.read_kv(table, TokenRange(0, 24)), portable.read_kv(table, TokenRange(0, 24)), strict=True):
        assert got.values.shape == (1, 24, 3, 16)
        assert np.abs(got.values - want.values).max() < 1e-4
    assert portable.stats().fallbacks == kernels.stats().fallbacks


def test_kv_goes_in_and_out_of_padded_pages_bit_for_bit(tmp_path: Path) -> None:
    """In bfloat16, NaN and all; one plane and some heads at a time; and a page copied on the device."""
    portable, kernels = engines(tmp_path / "model", "bfloat16", num_layers=2)
    rng = np.random.default_rng(0)
    table, tokens = np.array([3, 9, 1], np.int32), TokenRange(4, 15)
    blocks = portable.read_kv(table, tokens)
    for block in blocks:
        block.values[...] = np.frombuffer(rng.bytes(block.values.nbytes), block.values.dtype).reshape(block.values.shape)
        kernels.write_kv(table, block)
    one_head = replace(blocks[1], heads=type(blocks[1].heads)(1, 2), values=np.ascontiguousarray(blocks[0].values[:, :, 1:2]))
    kernels.write_kv(table, one_head)
    blocks[1].values[:, :, 1] = blocks[0].values[:, :, 1]
    kernels.copy_page(9, 5)
    for got, want in zip(kernels.read_kv(np.array([3, 5, 1], np.int32), tokens), blocks, strict=True):
        assert np.array_equal(bits(got.values), bits(want.values))


def chosen(platform: str, kind: str, kv_dtype: str = "bfloat16", pages_per_row: int = 100) -> JaxOps:
    device = SimpleNamespace(platform=platform, device_kind=kind)
    shape = {"num_heads": 8, "kv_heads": 3, "head_dim": 80, "max_rows": 64, "pages_per_row": pages_per_row}
    return choose(device, kv_dtype=jnp.dtype(kv_dtype), **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v5", "TPU v6 lite"])
def test_a_known_tpu_gets_kernels_and_its_block_sizes(kind: str) -> None:
    ops = chosen("tpu", kind)
    assert (ops.path, ops.fallbacks) == ("pallas", ())
    generation = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e"}[kind]
    assert ops.blocks == block_sizes(generation, num_heads=8, token_bytes=2 * 4 * 128 * 2)
    assert (ops.token_shape, ops.storage_dtype) == ((8, 128), np.uint16)


def test_a_cpu_is_portable_without_being_a_fallback() -> None:
    ops = chosen("cpu", "cpu")
    assert (ops.path, ops.fallbacks, ops.token_shape, ops.storage_dtype) == ("portable", (), (6, 80), np.uint16)


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        (("tpu", "TPU v9"), {}, "portable_attention_no_kernel_for_device"),
        (("gpu", "NVIDIA H100"), {}, "portable_attention_no_kernel_for_device"),
        (("tpu", "TPU v5p"), {"kv_dtype": "float16"}, "portable_attention_kv_dtype"),
        (("tpu", "TPU v5p"), {"pages_per_row": 4000}, "portable_attention_page_tables_too_large"),
    ],
)
def test_portable_where_kernels_were_expected_has_a_name(device: tuple[str, str], changes: dict[str, object], reason: str) -> None:
    ops = chosen(*device, **changes)  # type: ignore[arg-type]
    assert (ops.path, ops.fallbacks) == ("portable", (reason,))
