"""`pdd bench hits`: what counts as a dip, and real runs whose hits are exact."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from pdd.bench.hits import Plan, Point, below_line, rows_of, run
from tests.support.tiny_models import make_tiny_llama

RATES = (0, 5, 10, 15, 20)


def test_a_point_is_held_against_the_line_between_its_neighbours() -> None:
    assert below_line((0, 5, 10), (100.0, 90.0, 100.0)) == [None, pytest.approx(0.1), None]
    assert below_line((0, 5, 10), (100.0, 75.0, 50.0)) == [None, pytest.approx(0.0), None]
    assert below_line((0, 5, 20), (100.0, 90.0, 60.0)) == [None, pytest.approx(0.0), None]  # neighbours at unequal distance


@pytest.mark.parametrize(("share", "dips"), [(0.91, True), (0.93, False)])
def test_only_a_dip_beyond_the_limit_is_one(share: float, dips: bool) -> None:
    plan = Plan((("jax", "float32"),), rates=RATES)
    points = {rate: [Point(1.0, 2.0, 2000, int(1000 * (share if rate == 10 else 1)), 3)] for rate in RATES}
    rows = rows_of("jax", "float32", plan, points)
    assert [row.hit_rate for row in rows if row.dips] == ([10] if dips else [])
    assert rows[0].computed_per_s == 1000
    assert rows[0].served_per_s == 2000
    assert rows[0].computed_per_cpu_s == 500


@pytest.mark.parametrize("wrong", [{"rates": (5, 0)}, {"rates": (0, 100)}, {"rates": ()}, {"shortest": 9, "longest": 8}, {"rounds": 0}])
def test_plan_refuses(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^(rates|lengths|rounds): given"):
        Plan((("jax", "float32"),), **wrong)  # type: ignore[arg-type]


@pytest.mark.system
def test_a_real_run_hits_exactly_what_was_cached(tmp_path: Path) -> None:
    """Also inside a page; every prompt's last token is left to whoever decodes."""
    model_dir = make_tiny_llama(tmp_path / "m", max_context=128)
    plan = Plan((("torch", "float32"),), rates=(0, 50, 95), prompts=3, shortest=40, longest=90, step_tokens=32, rounds=1, threads=1)
    cache_dir = Path(os.environ.get("PDD_CACHE") or Path.home() / ".cache" / "pdd")  # native kernels take a minute to build
    rows = run(model_dir, cache_dir, plan, Console(quiet=True), tmp_path / "hits.json")
    lengths = plan.lengths()
    assert any(length * 95 // 100 % 16 for length in lengths)
    for row in rows:
        assert row.computed_tokens == sum(length - 1 - length * row.hit_rate // 100 for length in lengths)
        assert row.steps == -(-row.computed_tokens // 32)  # no step but the last has room left
    report = json.loads((tmp_path / "hits.json").read_text())
    assert report["lengths"] == list(lengths)
    assert [row["hit_rate"] for row in report["rows"]] == [0, 50, 95]
