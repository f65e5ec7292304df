"""What compilers make of the Triton kernels for NVIDIA GPUs that are not here, read from the code: beyond what ``pdd compile`` tells."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIES_OF_16_BYTES = ["LDGSTS.E.BYPASS.128"]

Row = Mapping[str, int | str | list[str]]


def compiled(target: str, *cases: str) -> list[Row]:
    """A row per kernel; see tests.support.triton_compiler. In a process of its own, which no other kernel has chosen a target for."""
    command = [sys.executable, "-m", "tests.support.triton_compiler", target, *cases]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


def check_attention(row: Row, products: str) -> None:
    assert row[products], row
    # Every copy of keys and values in the loops, masked or not, is of 16 bytes a thread and goes past the registers.
    assert row["copies"] == COPIES_OF_16_BYTES, row


def test_sm_90_takes_warp_group_products_for_chunks_and_rounds_new_kv_to_nearest_even() -> None:
    rows = compiled("sm90", "llama-3.1-8b", "append to bfloat16", "append to float16")
    few, many = (row for row in rows if row["kernel"] == "attend_tiles")
    assert (few["rows"], many["rows"]) == (16, 128)
    check_attention(few, "products")
    check_attention(many, "warp_group_products")
    assert [row["spill_bytes"] for row in rows] == [0] * 5
    appends = {str(row["case"]): row["conversions"] for row in rows if row["kernel"] == "append_tokens"}
    for case, kind in (("append to bfloat16", ".bf16"), ("append to float16", ".f16")):
        conversions = [str(name) for name in appends[case] if kind in str(name)]  # type: ignore[union-attr]
        assert conversions
        assert all(name.startswith("cvt.rn.") for name in conversions)


@pytest.mark.slow
@pytest.mark.timeout(3600)
# On sm_80 a few combinations that no named model has put a few bytes on the stack, at 48 to 72 registers of 255.
@pytest.mark.parametrize(("target", "most_spill_bytes"), [("sm80", 24), ("sm90", 0)])
def test_every_head_size_and_dtype_without_spills(target: str, most_spill_bytes: int) -> None:
    rows = compiled(target)
    assert {str(row["case"]).split(" window")[0] for row in rows} >= {
        f"dim {dim} {dtype}" for dim in (64, 80, 96, 128, 256) for dtype in ("float16", "float32")
    }
    for row in rows:
        if str(row["kernel"]).startswith("attend") and "float32" not in str(row["case"]):
            takes_warp_groups = target == "sm90" and row["kernel"] == "attend_tiles" and row["rows"] != 16
            check_attention(row, "warp_group_products" if takes_warp_groups else "products")
        assert int(str(row["spill_bytes"])) <= most_spill_bytes, row
