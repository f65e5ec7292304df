"""A deployment under mixed traffic stays as it was, and one without any does nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from pdd.bench.steady import Plan, run
from pdd.bench.steady_watch import Watch
from pdd.config import load
from tests.support.deployments import launch_config
from tests.system.conftest import Running

IDLE_S = 5.0
KINDS = {"chat", "ids", "turn", "sampled", "choices", "cancelled"}


@pytest.mark.system
def test_twenty_seconds_of_mixed_traffic(tiny_model: Path, cache_dir: Path, tmp_path: Path) -> None:
    """What is counted, exactly; what is timed, not at all: this machine may be busy with other tests."""
    plan = Plan(minutes=1 / 3, clients=2, pause_s=0.2, words=15, prompt_tokens=150, answer_tokens=16, idle_s=1.0)
    config = launch_config(str(tiny_model), policy={"pipeline": "auto"})
    report = run(config, cache_dir, plan, Console(quiet=True), tmp_path / "steady.json")
    assert [fault for fault in report.faults if not any(word in fault for word in ("event loop", "while idle", "grew"))] == []
    assert set(report.requests) == KINDS
    rows = {row.process: row for row in report.rows}
    assert set(rows) == {"link", "prefill-0", "relay-0", "main-0", "coordinator"}
    assert [rows[name].compilations for name in ("prefill-0", "relay-0", "main-0")] == [0, 0, 0]
    assert all(row.growth < 0.2 for row in report.rows)
    assert {name for name, row in rows.items() if row.lag_p99_s is not None} == set(rows) - {"link"}
    assert (tmp_path / "steady.json").stat().st_size > 0


@pytest.mark.system
def test_idle_means_no_spinning(tiny: Running) -> None:
    """CPU time is the process's own, whatever else the machine does."""
    shares = Watch(tiny.deployment).cpu_shares(IDLE_S)
    assert set(shares) == {"link", "prefill-0", "relay-0", "main-0", "coordinator"}
    assert {name: share for name, share in shares.items() if share > 0.02} == {}


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(1200)
def test_ten_minutes_of_mixed_traffic(cache_dir: Path, tmp_path: Path) -> None:
    """The default deployment and model. On a machine that is busy otherwise the event loops are late for want of a core."""
    config = load(Path(__file__).parents[2] / "configs" / "local.yaml")
    serving = config.serving.model_copy(update={"http_port": None, "grpc_port": None})
    report = run(config.model_copy(update={"serving": serving}), cache_dir, Plan(), Console(quiet=True), tmp_path / "steady.json")
    assert report.faults == ()
    assert set(report.requests) == KINDS
