"""`pdd conform` whole: L4 through real workers and the public API on a tiny model, and every level on the real chat model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdd.conform.ladder import run
from pdd.conform.plan import Plan
from pdd.conform.report import Report
from pdd.conform.side import Dtype, parse_side
from tests.support.tiny_models import make_tiny_llama

pytestmark = pytest.mark.system


def through_workers(a: str, b: str, dtype: Dtype, model_a: Path, model_b: Path, cache_dir: Path) -> Report:
    sides = parse_side("a", a, model_a, 16), parse_side("b", b, model_b, 12)
    plan = Plan(("L4",), (dtype,), seed=3, prompt_tokens=40, handoffs=(0, 1, 6), new_tokens=7, step_tokens=64)
    return run(sides, plan, cache_dir, lambda line: None)


def checks_of(report: Report) -> dict[tuple[str, str], bool]:
    return {(check.way, check.what): check.passed for check in report.checks}


@pytest.mark.parametrize(
    ("a", "b", "dtype"),
    [
        ("torch:cpu", "torch:cpu", "float32"),
        pytest.param("jax:cpu", "torch:cpu", "float32", marks=pytest.mark.slow),
        pytest.param("jax:cpu", "torch:cpu", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_l4_moves_kv_and_gives_the_senders_tokens(a: str, b: str, dtype: Dtype, tiny_model: Path, cache_dir: Path) -> None:
    report = through_workers(a, b, dtype, tiny_model, tiny_model, cache_dir)
    what = ("greedy answers", "greedy: KV moved", "sampled answers", "sampled: KV moved")
    assert checks_of(report) == {(way, name): True for way in ("a->b", "b->a") for name in what}
    moved = [check.note for check in report.checks if "moved" in check.what]
    assert all(note.endswith("MB of KV, main prefilled nothing") for note in moved)


@pytest.mark.slow
def test_l4_of_two_models_fails_with_what_the_handshake_says(tiny_model: Path, cache_dir: Path, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "other", num_heads=6, num_kv_heads=3, hidden=48, head_dim=16, num_layers=3, max_context=512, seed=1)
    report = through_workers("torch:cpu", "torch:cpu", "float32", tiny_model, other, cache_dir)
    assert report.failed_levels == ("L4",)
    assert [check.way for check in report.checks] == ["a->b", "b->a"]
    assert all("fingerprint" in check.note for check in report.checks)


def conform(arguments: Sequence[str], json_file: Path) -> dict[str, object]:
    """The command on the real model: its report, once it ended with status 0."""
    command = [sys.executable, "-m", "pdd.cli", "conform", "--model", "smollm2-135m", *arguments, "--json", str(json_file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    fields: dict[str, object] = json.loads(json_file.read_text())
    return fields


@pytest.mark.smollm2
def test_smollm2_bytes_and_attention(smollm2_dir: Path, tmp_path: Path) -> None:
    options = ["--a", "torch:cpu", "--b", "torch:cpu", "--dtype", "float32", "--levels", "L0,L1", "--prompt-tokens", "60"]
    assert conform(options, tmp_path / "report.json")["passed"] is True


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.timeout(1800)
def test_smollm2_passes_every_level_in_both_dtypes_and_directions(smollm2_dir: Path, tmp_path: Path) -> None:
    fields = conform(["--a", "jax:cpu", "--b", "torch:cpu"], tmp_path / "report.json")
    checks = fields["checks"]
    assert isinstance(checks, list)
    for dtype in ("float32", "bfloat16"):
        seen = {(check["level"], check["way"]) for check in checks if check["dtype"] == dtype}
        assert {(level, way) for level in ("L0", "L3", "L4") for way in ("a->b", "b->a")} <= seen
        assert {(level, way) for level in ("L1", "L2", "L3") for way in ("a", "b")} <= seen
    rates = fields["audit_rates"]
    assert isinstance(rates, dict)
    assert set(rates) == {"float32", "bfloat16"}
    assert rates["float32"] == 0
