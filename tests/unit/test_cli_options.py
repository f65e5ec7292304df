"""Options that make no sense are refused at once, in words that name them, by every command that has them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdd.cli import app

SIM = ["sim", "--config", "configs/sim/published.yaml", "--workload", "configs/sim/published_traffic.yaml"]
PLAN = ["plan", "--model", "llama-3.1-8b", "--workload", "configs/sim/published_traffic.yaml"]
CONFORM = ["conform", "--a", "jax:cpu", "--b", "torch:cpu", "--model", "none"]
PLOTTING = [SIM, PLAN, ["bench", "ttft"], ["bench", "handoff"], ["bench", "hits"]]


def refused(options: list[str]) -> str:
    """What is said of them; every mistake is said before any work, and none ends in a traceback."""
    done = CliRunner().invoke(app, options, env={"COLUMNS": "200", "PDD_CACHE": "/nonexistent"})
    assert done.exit_code in (1, 2), done.output
    assert isinstance(done.exception, SystemExit)
    return done.output


@pytest.mark.parametrize("command", PLOTTING, ids=" ".join)
def test_a_figure_has_a_suffix_that_can_be_drawn(command: list[str], tmp_path: Path) -> None:
    assert "--plot: given" in refused([*command, "--plot", str(tmp_path / "a.xyz")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([*CONFORM, "--page-a", "0"], "--page-a"),
        ([*CONFORM, "--page-b", "-1"], "--page-b"),
    ],
    ids=str,
)
def test_a_number_out_of_range(options: list[str], named: str) -> None:
    assert named in refused(options)
