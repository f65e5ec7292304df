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


def test_a_report_has_a_suffix_that_says_what_it_is(tmp_path: Path) -> None:
    assert "allowed a name that ends in .html or .png" in refused(["bench", "serve", "--report", str(tmp_path / "a.xyz")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([*CONFORM, "--page-a", "0"], "--page-a"),
        ([*CONFORM, "--page-b", "-1"], "--page-b"),
        (["bench", "ttft", "--num-prompts", "0"], "--num-prompts"),
        (["bench", "ttft", "--mix", "skewed", "--num-prompts", "0"], "--num-prompts"),
        (["bench", "ttft", "--link-rate-mbit-s", "-1"], "--link-rate-mbit-s: given -1"),
        (["bench", "handoff", "--rate-mbit-s", "nan"], "--rate-mbit-s: given nan"),
        (["bench", "handoff", "--jitter-ms", "-1"], "jitter_ms: "),
        (["bench", "hits", "--rounds", "0"], "rounds: given 0, allowed 1 or more"),
        (["bench", "steady", "--clients", "0"], "clients: given 0, allowed 1 or more"),
        (["bench", "engine", "--streams", "1,0"], "streams: given [1, 0]"),
        (["bench", "serve", "--turns", "0"], "--turns"),
        (["bench", "serve", "--vocab-size", "0"], "--vocab-size"),
        (["bench", "serve", "--max-concurrency", "0"], "--max-concurrency"),
        (["bench", "serve", "--output-length-scale", "0"], "--output-length-scale: given 0"),
        (["chaos", "--requests", "0"], "--requests"),
        ([*PLAN, "--price", "abacus=1"], "--price: given 'abacus=1', allowed for the chips of --chips: h100, mi300x"),
        ([*PLAN, "--flow-gbit-s", "0"], "--flow-gbit-s: given 0"),
        ([*PLAN, "--share", "2"], "share: given 2"),
        ([*SIM, "--slo-ttft-s", "-1"], "--slo-ttft-s: given -1"),
        ([*SIM, "--against", "/nonexistent"], "--against /nonexistent: No such file or directory"),
        ([*SIM, "--against", "configs/local.yaml"], "--against configs/local.yaml: no report"),
        ([*SIM[:-1], "/nonexistent"], "workload /nonexistent: No such file or directory"),
    ],
    ids=str,
)
def test_a_number_out_of_range(options: list[str], named: str) -> None:
    said = refused(options)
    assert named in said
    assert not any(noise in said for noise in ("Plan(", "Objectives(", "https://errors", "Errno"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("kind: magic", "kind: given 'magic', allowed 'stated_hits'"),
        ("rate_per_s: 1", "top level: field 'kind' is needed"),
    ],
)
def test_a_workload_of_no_known_kind(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(text)
    assert named in refused([*SIM[:-1], str(tmp_path / "w.yaml")])


def test_figures_of_no_simulated_mode(tmp_path: Path) -> None:
    (tmp_path / "live.json").write_text("{}")
    assert "given modes [], allowed one at least of" in refused([*SIM, "--against", str(tmp_path / "live.json")])
