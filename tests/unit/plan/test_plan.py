"""The planner: costs follow the peaks, plans keep what was asked, and what changes a price changes nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pdd.cli import app
from pdd.plan.capacity import decode_group, link_gbit_s, num_decode, num_prefill, prefill_group
from pdd.plan.catalogue import CHIP_CATALOGUE, MODEL_CATALOGUE, PlanChip, chip, model
from pdd.plan.demand import Means, Objectives, Prices, means
from pdd.plan.revenue import revenue_curve, valley
from pdd.plan.roofline import Efficiency, chips_needed, engine_cost, kv_tokens
from pdd.plan.search import Plan, Problem, Sites, search
from pdd.sim.workload import StatedHits

_BASE = {"kind": "stated_hits", "rate_per_s": 300.0, "num_requests": 1000, "prompt_tokens": 15_000, "output": {"median": 300}}
_TRAFFIC = StatedHits.model_validate(_BASE)
# Compute without bandwidth, bandwidth without compute: the two families that PDD is for.
_COMPUTE = replace(chip("h100"), name="compute", bytes_s=1.0e12)
_MEMORY = replace(chip("h100"), name="memory", flops_s=250e12, bytes_s=8.0e12)
_PROBLEM = Problem(
    replace(model("qwen3-32b"), kv_bytes_per_token=50_000),
    _TRAFFIC,
    Objectives(2.0, 0.03),
    Prices({"compute": 2.0, "memory": 2.0}),
    Efficiency(),
    Sites(flow_bytes_s=None),
    num_requests=200,
)


def test_every_fact_of_the_catalogue_has_a_source_and_a_date() -> None:
    assert all(one.source and one.read_on for one in CHIP_CATALOGUE.values())
    assert all(one.source for one in MODEL_CATALOGUE.values())
    with pytest.raises(ValueError, match="no public price"):
        _ = chip("h20").mid_price
    with pytest.raises(ValueError, match="chip: given 'h900'"):
        chip("h900")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CHIP_CATALOGUE)), st.sampled_from(sorted(MODEL_CATALOGUE)), st.integers(0, 3))
def test_costs_follow_the_peaks(name: str, what: str, doublings: int) -> None:
    of, whole = chip(name), model(what)
    num = chips_needed(of, whole, Efficiency(), 1000) << doublings
    assert kv_tokens(of, num, whole, Efficiency()) >= 1000
    one, two = (engine_cost(of, count, whole, Efficiency(step_s=0.0)) for count in (num, 2 * num))
    assert two.prefill(5000, 1000) == pytest.approx(one.prefill(5000, 1000) / 2)
    assert two.step(10, 50_000) == pytest.approx(one.step(10, 50_000) / 2)
    least_s = 2 * whole.active_params * 5000 / (num * of.flops_s)
    assert one.prefill(5000, 1000) > least_s
    assert one.step(10, 50_000) > whole.total_params * whole.bytes_per_param / (num * of.bytes_s)


def test_means_are_those_of_the_traffic() -> None:
    odd = StatedHits.model_validate({**_BASE, "singular_share": 0.1, "singular_output_tokens": 10, "mean_hit": 0.9})
    assert means(odd) == Means(15_000, pytest.approx(15_000 * (0.1 + 0.9 * 0.1)), pytest.approx(0.1 * 10 + 0.9 * 300))
    assert link_gbit_s(2, means(odd), 1e5, with_cache=True) < 0.2 * link_gbit_s(2, means(odd), 1e5, with_cache=False)


def test_a_decode_group_keeps_the_pace_with_all_rows_in_use() -> None:
    what = means(_TRAFFIC)
    group = decode_group(_MEMORY, _PROBLEM.model, Efficiency(), what, 0.03)
    assert group is not None
    assert group.cost.step(group.max_rows, group.max_rows * what.context) <= 0.03
    assert decode_group(_MEMORY, _PROBLEM.model, Efficiency(), what, 0.001) is None
    assert num_decode(20, group, what) >= 2 * num_decode(10, group, what) - 1
    first = prefill_group(_COMPUTE, _PROBLEM.model, Efficiency(), what)
    assert num_prefill(60, first, what) > num_prefill(6, first, what)


@cache
def _found(kind: str, first: PlanChip, second: PlanChip) -> Plan:
    plan = search(_PROBLEM, kind, first, second)  # type: ignore[arg-type]
    assert plan is not None
    return plan


def test_two_families_beat_either_alone_and_the_plan_keeps_the_objectives() -> None:
    pdd = _found("pdd", _COMPUTE, _MEMORY)
    assert pdd.good_share >= 0.9
    assert pdd.link_gbit_s * 0.95 >= link_gbit_s(300.0, means(_TRAFFIC), _PROBLEM.model.kv_bytes_per_token, with_cache=True)
    assert pdd.cost_per_hour == pytest.approx(sum(pdd.num_chips.values()) * 2.0 + pdd.link_gbit_s * Prices({}).per_gbit_hour)
    alone = [plan for one in (_COMPUTE, _MEMORY) if (plan := search(_PROBLEM, "same_site", one, one)) is not None]
    assert all(pdd.bcr > plan.bcr for plan in alone)


def test_tails_that_run_alone_make_a_deeper_valley() -> None:
    pdd = _found("pdd", _COMPUTE, _MEMORY)
    what, kv_bytes = means(_TRAFFIC), _PROBLEM.model.kv_bytes_per_token
    alone, joined = (revenue_curve(pdd, what, _PROBLEM.prices, kv_bytes, 8192, joined) for joined in (False, True))
    assert all(a.dollars_per_hour <= b.dollars_per_hour * (1 + 1e-9) for a, b in zip(alone, joined, strict=True))
    assert valley(alone) is not None
    assert [point.hit_rate for point in joined[:3]] == [0.0, 0.01, 0.02]


def test_the_command_answers_in_words_and_figures(tmp_path: Path) -> None:
    workload, file, plot = tmp_path / "w.yaml", tmp_path / "p.json", tmp_path / "p.png"
    workload.write_text(json.dumps({**_BASE, "rate_per_s": 1.0, "prompt_tokens": 4000}))
    options = ["--model", "llama-3.1-8b", "--workload", str(workload), "--chips", "l40s", "--ttft-s", "3", "--json", str(file)]
    result = CliRunner().invoke(app, ["plan", *options, "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert found["plans"]["same_site"]["good_share"] >= 0.9
    assert found["plans"]["pdd"] is None  # one family only
    assert plot.stat().st_size > 1000
    refused = CliRunner().invoke(app, ["plan", *options[:-2], "--price", "l40s=-1"])
    assert refused.exit_code == 2
