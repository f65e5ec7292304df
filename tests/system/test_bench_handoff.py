"""`pdd bench handoff` on real processes, over a tiny model: the rows it promises, and that the KV route really moves the KV."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from pdd.bench.handoff import Plan, run, save_plot, show
from pdd.config import EmulatedLink
from tests.support.deployments import launch_config
from tests.support.tiny_models import make_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.system]


def test_the_benchmark_measures_both_routes(tmp_path: Path) -> None:
    model = make_tiny_llama(tmp_path / "model", num_kv_heads=2, head_dim=16, num_layers=3, max_context=1024)
    config = launch_config(str(model), engines=("torch", "torch", "torch"), max_context=1024)
    link = EmulatedLink(rate_mbit_s=20, rtt_ms=10, jitter_ms=2)
    plan = Plan(link, tokens=(10, 100), rounds=3, neighbour_rounds=2, background_tokens=100, background_pause_s=0.05)
    rows = run(config, tmp_path / "cache", plan, Console(quiet=True), tmp_path / "out" / "rows.json")
    written = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert [(row["tokens"], row["route"]) for row in written] == [(10, "ids"), (10, "kv"), (100, "ids"), (100, "kv")]
    assert {"payload_bytes", "mean_s", "p99_s", "max_s", "std_s"} <= set(written[0])
    by_key = {(row.tokens, row.route): row for row in rows}
    per_token = 3 * 2 * 2 * 16 * 4  # layers, k and v, heads, dims, float32
    assert by_key[10, "kv"].payload_bytes == 10 * per_token
    assert by_key[100, "kv"].payload_bytes == 100 * per_token
    assert by_key[100, "ids"].payload_bytes < 2000
    for row in rows:
        # No handoff beats the round trip, and no transfer the line: 2.5 MB/s.
        assert row.max_s >= row.p99_s >= row.p50_s > 0.01
        if row.route == "kv":
            assert row.p50_s > row.payload_bytes / 2.5e6
        assert row.neighbour_gap_s > 0
    save_plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    console = Console(record=True, width=120)
    show(rows, plan, console)
    assert "4,649 KB" in console.export_text()
