"""The roofline figures of kernels/README.md against the hardware table and the counts they are said to come from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pddkernels.shapes import MLA_SHAPES, MODEL_SHAPES
from pddkernels.targets.hardware import CHIPS
from pddkernels.targets.work import Row, attention, latent_attention

README = Path(__file__).parents[3] / "kernels" / "README.md"
ROWS = re.findall(r"^\| ([\w .]+?) \| (\d+) \| (\d+) \| (\d+) \|$", README.read_text(), re.MULTILINE)
LONG = 10**6


def test_chips_are_those_of_the_hardware_table() -> None:
    stated = {name: (int(peak), int(bandwidth), int(ridge)) for name, peak, bandwidth, ridge in ROWS}
    assert stated == {
        chip.name: (round(chip.flops_s / 1e12), round(chip.bytes_s / 1e9), round(chip.flops_s / chip.bytes_s)) for chip in CHIPS.values()
    }


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_decode_has_as_many_flops_per_byte_as_query_heads_per_kv_head(name: str) -> None:
    shape = MODEL_SHAPES[name]
    work = attention([Row(LONG, 1)], shape.num_heads, shape.num_kv_heads, shape.head_dim)
    assert work.flops / work.num_bytes == pytest.approx(shape.num_heads / shape.num_kv_heads, rel=1e-4)


def test_a_chunk_has_that_per_token() -> None:
    shape = MODEL_SHAPES["llama-3.1-8b"]
    work = attention([Row(LONG, 60)], shape.num_heads, shape.num_kv_heads, shape.head_dim)
    assert work.flops / work.num_bytes == pytest.approx(4 * 60, rel=1e-2)
    work = attention([Row(0, LONG)], shape.num_heads, shape.num_kv_heads, shape.head_dim)
    assert work.flops / work.num_bytes == pytest.approx(LONG * 32 / (2 * (32 + 8)), rel=1e-4)


def test_latent_decode_is_at_the_ridge() -> None:
    shape = MLA_SHAPES["deepseek-v3"]
    work = latent_attention([Row(LONG, 1)], shape.num_heads, shape.latent_dim, shape.rope_dim)
    stated = re.search(r"DeepSeek-V3 .*? has (\d+) FLOPs per byte", README.read_text())
    assert stated is not None
    assert work.flops / work.num_bytes == pytest.approx(int(stated[1]), rel=2e-3)
