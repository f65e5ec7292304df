"""The counts behind the roofline, against counting one by one; and the table of chips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.compile.children import TARGETS as NAMES
from pddkernels.shapes import MODEL_SHAPES
from pddkernels.targets.hardware import CHIPS, TARGETS, target
from pddkernels.targets.work import Row, Work, attention, bound, latent_attention, step

rows_strategy = st.lists(st.builds(Row, st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=4)


@given(rows_strategy, st.one_of(st.none(), st.integers(1, 20)))
def test_attention_counts_each_visible_key_of_each_query(rows: list[Row], window: int | None) -> None:
    seen, keys, tokens = 0, 0, 0
    for context_len, num_new in rows:
        row_keys: set[int] = set()
        for position in range(context_len, context_len + num_new):
            visible = [key for key in range(position + 1) if window is None or key > position - window]
            seen += len(visible)
            row_keys.update(visible)
        keys += len(row_keys)
        tokens += num_new
    counted = attention(rows, 6, 2, 8, window)
    assert counted.flops == seen * 6 * 8 * 2 * 2
    assert counted.num_bytes == 2 * (2 * tokens * 6 * 8 + 2 * keys * 2 * 8)


@given(rows_strategy)
def test_latent_attention_reads_one_key_for_all_heads(rows: list[Row]) -> None:
    seen = sum(position + 1 for context_len, new in rows for position in range(context_len, context_len + new))
    keys, tokens = sum(map(sum, rows)), sum(new for _, new in rows)
    counted = latent_attention(rows, 5, 16, 4)
    assert counted.flops == seen * 5 * 2 * (16 + 4 + 16)
    assert counted.num_bytes == 2 * (keys * 20 + tokens * 5 * (20 + 16))


def test_a_step_of_llama_8b_reads_its_weights_once() -> None:
    shape = MODEL_SHAPES["llama-3.1-8b"]
    one = step([Row(0, 1)], shape, 1)
    # 8.03e9 parameters less the embedding's 128,256 x 4,096, which is looked up, and norms.
    assert one.num_bytes == pytest.approx(2 * (8.03e9 - 128256 * 4096), rel=1e-3)
    assert one.flops == pytest.approx(one.num_bytes, rel=1e-3)
    many = step([Row(1000, 1)] * 8, shape, 8)
    assert many.num_bytes - one.num_bytes == pytest.approx(8 * 1002 * shape.kv_values_per_token * 2, rel=1e-2)
    assert step([Row(0, 1)], shape, 1, num_devices=8).num_bytes == one.num_bytes / 8


def test_the_bound_is_the_longer_of_the_two() -> None:
    chip = CHIPS["TPU v5e"]
    decode, prefill = bound(Work(1e9, 819e9), chip), bound(Work(197e12, 1e9), chip)
    assert (decode.by, decode.seconds) == ("bytes", 1.0)
    assert (prefill.by, prefill.seconds) == ("flops", 1.0)


def test_every_target_has_a_chip_with_plausible_peaks_and_a_source() -> None:
    assert tuple(TARGETS) == NAMES
    for chip in CHIPS.values():
        assert 1e14 < chip.flops_s < 1e16
        assert 5e11 < chip.bytes_s < 1e13
        assert 1.5e10 <= chip.memory_bytes < 1e12
        assert chip.source
        assert chip.read_on
    with pytest.raises(ValueError, match=r"target: given 'tpu-v9', allowed \['tpu-v5e'"):
        target("tpu-v9")
