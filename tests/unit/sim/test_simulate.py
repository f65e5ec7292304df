"""Whole simulated systems: against queueing theory, the law of conservation, and what the policies promise."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import simpy
from typer.testing import CliRunner

from pdd.cli import app
from pdd.policy_config import PolicyConfig
from pdd.sim.cache import Prompt
from pdd.sim.config import SimConfig, load_sim_config
from pdd.sim.costs import EngineCost
from pdd.sim.request import Outcome, Request
from pdd.sim.run import simulate
from pdd.sim.server import when
from pdd.sim.spec import LinkSpec, RoleSpec, SystemSpec
from pdd.sim.system import System
from pdd.sim.workload import LogNormal, Sessions, StatedHits, load_workload

_COST = EngineCost(prefill_s=0.0, prefill_token_s=1e-4, prefill_pair_s=0.0, step_s=0.02, row_s=1e-5, context_s=0.0, extend_token_s=1e-4)
SPEC = SystemSpec(
    prefill=RoleSpec(1, _COST, 8, 1_000_000, step_tokens=512),
    relay=RoleSpec(1, _COST, 16, 1_000_000),
    main=RoleSpec(1, _COST, 64, 1_000_000),
    link=LinkSpec(rate_bytes_s=1e9, rtt_s=0.03),
    kv_bytes_per_token=50_000,
    local_bytes_s=1e11,
    policy=PolicyConfig(),
)


def _traffic(rate: float, num: int, **more: object) -> StatedHits:
    given: dict[str, object] = {"kind": "stated_hits", "rate_per_s": rate, "num_requests": num, "prompt_tokens": 5001}
    return StatedHits.model_validate({**given, "output": {"median": 50}, **more})


def test_waiting_for_prefill_is_that_of_an_m_d_1_queue() -> None:
    """Pollaczek-Khinchine: the mean wait of Poisson arrivals for a fixed service s at load r is r s / (2 (1 - r))."""
    one_by_one = replace(SPEC.prefill, max_rows=1, step_tokens=5000)
    spec = replace(SPEC, prefill=one_by_one, main=replace(SPEC.main, max_rows=10_000), link=LinkSpec(1e15, 0.0), rule="direct")
    service_s, load = 0.5, 0.7
    _, found = simulate(spec, _traffic(load / service_s, 6000, high_share=0, mean_hit=0, low_spread=0), seed=3)
    ttft = found["ttft_s"]
    assert isinstance(ttft, dict)
    expected = service_s + load * service_s / (2 * (1 - load)) + 0.021
    assert ttft["mean"] == pytest.approx(expected, rel=0.1)


def test_every_token_is_made_once_and_every_missing_byte_crosses_once() -> None:
    traffic = _traffic(0.5, 400, high_share=0.7, mean_hit=0.8)
    spec = replace(SPEC, policy=PolicyConfig.model_validate({"background": {"max_transfers": 0}, "local": {"max_share": 0}}))
    report, found = simulate(spec, traffic, seed=1)
    assert report.ttft.num == report.reasons.total() == 400
    assert report.relay_tokens + report.main_tokens == 400 * 50
    missing = (400 * 5000 - report.main_hit) * 50_000
    assert found["link_bytes"] == pytest.approx(missing, rel=1e-6)


def test_prefill_that_began_for_the_relay_alone_ends_where_main_turns_out_to_hold_the_prompt() -> None:
    """Ten steps of it, of which it has the one that ran when main answered, and keeps what that computed."""
    env, ended = simpy.Environment(), list[Outcome]()
    system = System(env, replace(SPEC, link=replace(SPEC.link, rtt_s=0.06)))
    prompt = Prompt((("p", 5121),))
    system.main.workers[0].cache.put(prompt.chain)
    system.submit(Request("t", prompt, 50, 50), ended.append)
    env.run()
    assert (ended[0].decision.reason, ended[0].relay_tokens, system.num_running) == ("within_budget", 0, 0)
    prefill = system.prefill.workers[0]
    assert (prefill.held, prefill.engine.busy_s) == (0, pytest.approx(2 * 0.0512))
    assert prefill.cache.num_tokens == 512
    assert system.link.sent_bytes == 0


def _in_order(spec: SystemSpec, *requests: tuple[float, Request]) -> tuple[System, dict[str, Outcome]]:
    """Each from its time on; what came of them by tenant."""
    env, ended = simpy.Environment(), dict[str, Outcome]()
    system = System(env, spec)
    for at_s, request in requests:
        when(env.timeout(at_s), lambda request=request: system.submit(request, lambda one: ended.update({one.request.tenant: one})))
    env.run()
    return system, ended


def _asked(name: str, prompt_tokens: int, output_tokens: int, max_tokens: int = 500) -> Request:
    return Request(name, Prompt(((name, prompt_tokens),)), output_tokens, max_tokens)


@pytest.mark.parametrize("second", [False, True])
def test_a_transfer_that_nobody_waits_for_gives_way_to_one_that_somebody_does(second: bool) -> None:
    """50 MB at 1 MB/s, whose request the relay has ended; a second later another has 7.5 MB of its own on that line."""
    spec = replace(SPEC, link=LinkSpec(1e6, 0.03, schedule="shortest"))
    more = [(1.0, _asked("second", 151, 200))] if second else []
    system, ended = _in_order(spec, (0.0, _asked("first", 1001, 5)), *more)
    assert (ended["first"].relay_tokens, ended["first"].kv_bytes) == (5, 5e7)
    assert system.main.workers[0].cache.peek_tokens((("first", 1001),)) == (0 if second else 1001)
    assert (system.main.workers[0].held, system.link.num_transfers) == (0, 0)


def test_a_transfer_that_was_put_off_hurries_once_its_answer_is_longer_than_predicted() -> None:
    """The line has eight seconds of another's KV; answers so far had five tokens, and this one has two hundred."""
    spec = replace(SPEC, link=LinkSpec(5e7, 0.03, schedule="shortest"))
    short = [(0.1, _asked(f"short {number}", 11, 5)) for number in range(25)]
    _, ended = _in_order(spec, (0.0, _asked("other", 8001, 500)), *short, (1.0, _asked("late", 1001, 200)))
    assert ended["late"].decision.ends_on_relay
    assert not ended["other"].decision.ends_on_relay
    assert 40 < ended["late"].relay_tokens < 80  # a second of the line, before what is left of the other's
    assert ended["late"].main_tokens == 200 - ended["late"].relay_tokens
    assert ended["other"].relay_tokens > 400


def test_a_transfer_is_not_predicted_to_take_less_than_its_flow_does() -> None:
    """However many others are under way: 50 MB at 10 MB/s, of a line of 1 GB/s."""
    spec = replace(SPEC, link=LinkSpec(1e9, 0.03, flow_bytes_s=1e7))
    _, ended = _in_order(spec, *((0.5 * number, _asked(f"{number}", 1001, 400)) for number in range(4)))
    for one in ended.values():
        assert one.decision.predicted_kv_s is not None
        assert one.decision.predicted_kv_s > 5.0


def test_a_relay_hides_the_link() -> None:
    traffic = _traffic(0.4, 400, high_share=0.7, mean_hit=0.8)
    policy = PolicyConfig(direct_budget_s=0.1, handoff="one_shot")
    slow = replace(SPEC, link=LinkSpec(rate_bytes_s=6e7, rtt_s=0.03), policy=policy)
    near = simulate(replace(slow, rule="direct", relay=None, link=LinkSpec(1e12, 0.0)), traffic, 0)[0]
    far = simulate(replace(slow, rule="direct", relay=None), traffic, 0)[0]
    pdd, found = simulate(slow, traffic, 0)
    assert far.ttft.quantile(0.99) > 3 * near.ttft.quantile(0.99)
    assert pdd.ttft.quantile(0.99) < 1.3 * near.ttft.quantile(0.99)
    assert pdd.pipelines["relay"] > 100
    assert isinstance(found["relay_share"], float)
    assert 0 < found["relay_share"] < 0.5


def test_what_is_kept_from_main_comes_back_as_load_on_the_relay() -> None:
    sessions = Sessions(
        kind="sessions",
        rate_per_s=0.02,
        num_requests=700,
        first=LogNormal(median=9000, sigma=0.4),
        added=LogNormal(median=300, sigma=1.0),
        output=LogNormal(median=120, sigma=0.5),
        wait_s=LogNormal(median=4, sigma=0.5),
        max_turns=20,
        max_context_tokens=60_000,
    )
    slow = replace(SPEC, link=LinkSpec(rate_bytes_s=2e8, rtt_s=0.03), relay=replace(SPEC.prefill, max_rows=4))
    normal = simulate(slow, sessions, 0)[1]
    collapsed = simulate(replace(slow, rule="relay_to_end"), sessions, 0)[1]
    assert isinstance(normal["main_hit_rate"], float)
    assert isinstance(collapsed["main_hit_rate"], float)
    assert normal["main_hit_rate"] > 0.8
    assert collapsed["main_hit_rate"] < 0.2
    assert collapsed["relay_share"] > 0.9  # type: ignore[operator]
    assert normal["relay_share"] < 0.2  # type: ignore[operator]


def test_equal_arguments_give_equal_bytes(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for file, seed in zip(files, ("4", "4", "5"), strict=True):
        options = ["--config", "configs/sim/published.yaml", "--workload", "configs/sim/published_traffic.yaml", "--num-requests", "150"]
        result = CliRunner().invoke(app, ["sim", *options, "--seed", seed, "--json", str(file)])
        assert result.exit_code == 0, result.output
    assert files[0].read_bytes() == files[1].read_bytes() != files[2].read_bytes()
    assert set(json.loads(files[0].read_text())) == {"same_site", "cross_site", "pdd"}


def test_memory_does_not_grow_with_requests() -> None:
    def peak(num: int) -> int:
        tracemalloc.start()
        simulate(SPEC, _traffic(2.0, num, high_share=0.8, mean_hit=0.9), 0)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(300)
    assert peak(1600) < 1.5 * peak(500) + 200_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: gpt\nprefill: {count: 1, chip: h100}\nmain: {count: 1, chip: h100}\nlink: {rate_gbit_s: 1, rtt_ms: 1}",
            "model: given 'gpt'",
        ),
        ("prefill: {count: 1}\nmain: {count: 1, chip: h100}\nlink: {rate_gbit_s: 1, rtt_ms: 1}", "prefill: .*either chip or cost"),
        (
            "model: 1t-class\nprefill: {count: 1, chip: h100}\nmain: {count: 1, chip: h100}\nlink: {rate_gbit_s: 1, rtt_ms: 1}",
            "does not fit",
        ),
    ],
)
def test_a_config_that_cannot_be_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_sim_config(file).spec()


def test_the_shipped_configs_load() -> None:
    assert isinstance(load_sim_config(Path("configs/sim/published.yaml")), SimConfig)
    assert load_workload(Path("configs/sim/agents_traffic.yaml")).kind == "sessions"
