"""The simulator and the live coordinator decide alike: by the same functions, and to the same ends in the same situations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.handoff_config import HandoffConfig
from pdd.policy.handoff import HandoffSnapshot, OverlapRules, Wait, next_action, reader_interval_s
from pdd.policy_config import PolicyConfig
from pdd.serving import background, begin_run, handoff_run, link_traffic, pooled_worker, worker_pool
from pdd.sim import background as sim_background
from pdd.sim import handoff as sim_handoff
from pdd.sim import prefill as sim_prefill
from pdd.sim import sending as sim_sending
from pdd.sim import system as sim_system
from pdd.sim import workers as sim_workers
from pdd.sim.cache import Prompt
from pdd.sim.request import Outcome, Request
from pdd.sim.spec import LinkSpec
from pdd.sim.system import System
from pdd.worker import step_rows
from tests.support.generation import collect, expected, hashed_token, make_request, params
from tests.support.scripted_workers import THREE_WORKERS, Cluster, serving
from tests.support.worker_script import Script, opened
from tests.unit.sim.test_simulate import SPEC

PROMPT_TOKENS = 20
LINK = LinkSpec(rate_bytes_s=5e6, rtt_s=0.01, schedule="shortest")  # what the scripted cluster's config declares


def test_both_call_the_same_policies() -> None:
    assert sim_system.choose_pipeline is begin_run.choose_pipeline
    assert sim_handoff.choose_handoff is handoff_run.choose_handoff
    assert sim_background.choose_completion is background.choose_completion
    assert sim_workers.choose_worker in (getattr(worker_pool, "choose_worker", None), getattr(pooled_worker, "choose_worker", None))
    assert sim_prefill.plan_step is step_rows.plan_step
    assert sim_sending.LinkQueue is link_traffic.LinkQueue
    assert sim_system.RELAY_FIRST is begin_run.RELAY_FIRST


@settings(max_examples=200, deadline=None)
@given(st.floats(0.01, 0.1), st.floats(0.01, 0.1), st.floats(0.0, 0.6), st.floats(0.0, 0.6))
def test_an_overlap_is_as_long_as_the_live_one(itl_s: float, main_itl_s: float, late_s: float, laid_by_s: float) -> None:
    """Token by token: each that the relay adds goes to the reader an interval after the one before, ``itl_s`` after which it came."""
    rules, steady_s = HandoffConfig(), max(itl_s, main_itl_s)
    interval_s = reader_interval_s(rules.pace, itl_s, steady_s)
    cover_s, tokens = min(laid_by_s, late_s, rules.max_cover_s), 0
    while True:
        tokens += 1
        snapshot = HandoffSnapshot(
            9, 9, False, True, False, False, None, tokens, late_s, None, cover_s + tokens * (interval_s - itl_s), itl_s, steady_s
        )
        if next_action("overlap", 64, OverlapRules(rules.max_tokens, rules.max_gap_s, rules.pace), snapshot) != Wait():
            break
    # A nanosecond less or more: where just so many tokens are enough, rounding says whether they are.
    less_s, more_s = (sim_handoff.covering_s(rules, itl_s, steady_s, late_s + more, laid_by_s) for more in (-1e-9, 1e-9))
    assert less_s - 1e-6 <= tokens * itl_s <= more_s + 1e-6
    assert more_s - less_s <= itl_s + 1e-6


def _simulated(kv_bytes: int, hit: int, relay: bool, policy: PolicyConfig) -> tuple[str, str]:
    env = simpy.Environment()
    spec = replace(SPEC, relay=SPEC.relay if relay else None, link=LINK, kv_bytes_per_token=kv_bytes, policy=policy)
    ended: list[Outcome] = []
    request = Request("t", Prompt((("p", PROMPT_TOKENS),)), 24, 24, hits=(0, hit))
    System(env, spec).submit(request, ended.append)
    env.run()
    return ended[0].decision.pipeline, ended[0].decision.reason


@pytest.mark.parametrize(
    ("kv_bytes", "hit", "relay", "forced"),
    [
        (100, 0, True, "auto"),  # next to nothing to send
        (1_000_000, 0, True, "auto"),  # four seconds of the link
        (100_000, 18, True, "auto"),  # a token's KV
        (1_000_000, 19, True, "auto"),  # nothing is missing
        (1_000_000, 0, False, "auto"),
        (1_000_000, 0, True, "direct"),
        (100, 0, True, "relay"),
        (10_000_000, 0, True, "local"),
    ],
)
async def test_a_request_takes_the_same_pipeline_for_the_same_reason(
    kv_bytes: int, hit: int, relay: bool, forced: Literal["auto", "direct", "relay", "local"]
) -> None:
    policy: dict[str, object] = {"pipeline": forced, "background": {"max_transfers": 0}}
    roles = THREE_WORKERS if relay else tuple(role for role in THREE_WORKERS if role[1] != "relay")
    scripts = {"main-0": Script(hit_tokens=hit)}
    async with serving(hashed_token, roles=roles, policy=policy, scripts=scripts, kv_bytes_per_token=kv_bytes) as (_, coordinator):
        live = (await collect(coordinator, make_request("r", tuple(range(40, 40 + PROMPT_TOKENS))))).timeline
    assert _simulated(kv_bytes, hit, relay, PolicyConfig.model_validate(policy)) == (live.pipeline, live.decision)


@dataclass(frozen=True)
class LateMain:
    """Main answers when the relay has made ``relayed`` tokens; before the first, 0. ``whole``: the relay holds the prompt · ``limit``: on
    the answer's length, ``output`` where it stops sooner.
    """

    kv_bytes: int
    hit: int
    relayed: int
    whole: bool = False
    limit: int = 120
    output: int | None = None
    forced: Literal["auto", "relay", "local"] = "auto"

    @property
    def policy(self) -> dict[str, object]:
        return {"pipeline": self.forced, "background": {"max_transfers": 0}}


@dataclass(frozen=True)
class Came:
    """``main_gets``: anything over the link · ``relay_tokens``: None where that is a matter of time."""

    pipeline: str
    reason: str
    main_gets: bool
    relay_tokens: int | None


def _simulated_late(case: LateMain, after_s: float | None = None) -> tuple[Came, str]:
    """Main's answer ``after_s`` after the relay's token, by the round trip; None: half a step."""
    cost = SPEC.relay.cost if SPEC.relay is not None else SPEC.main.cost
    step_s = cost.step(1, 0.0)
    first_s = step_s if case.whole else step_s + SPEC.prefill.cost.prefill(PROMPT_TOKENS - 1, 0)
    env, ended = simpy.Environment(), list[Outcome]()
    link = replace(LINK, rtt_s=first_s + (case.relayed - 1) * step_s + (step_s / 2 if after_s is None else after_s))
    spec = replace(SPEC, link=link, kv_bytes_per_token=case.kv_bytes, policy=PolicyConfig.model_validate(case.policy))
    system = System(env, spec)
    assert system.relay is not None
    system.main.workers[0].cache.put((("p", case.hit),))
    if case.whole:
        system.relay.workers[0].cache.put((("p", PROMPT_TOKENS),))
    system.submit(Request("t", Prompt((("p", PROMPT_TOKENS),)), case.output or case.limit, case.limit), ended.append)
    env.run()
    for worker in (system.relay.workers[0], system.main.workers[0], system.prefill.workers[0]):
        assert (worker.held, worker.engine.num_jobs) == (0, 0)
    assert (system.num_running, system.link.num_transfers) == (0, 0)
    outcome = ended[0]
    assert outcome.relay_tokens + outcome.main_tokens == (case.output or case.limit)
    assert system.relay.workers[0].engine.served < max(1, outcome.relay_tokens) + 1  # one that is let go of makes no more
    decision = outcome.decision
    return Came(decision.pipeline, decision.reason, outcome.kv_bytes > 0, outcome.relay_tokens), decision.text


async def _live_late(case: LateMain) -> Came:
    gate, kv_gate = opened(False), opened(case.relayed > 0 or case.limit == 1)
    scripts = {
        "main-0": Script(reserve_gate=gate, hit_tokens=case.hit),
        "relay-0": Script(hit_tokens=1000 if case.whole else 0, kv_event_gate=kv_gate),
    }
    roles, kv_bytes = THREE_WORKERS, case.kv_bytes
    async with serving(hashed_token, roles=roles, policy=case.policy, scripts=scripts, kv_bytes_per_token=kv_bytes) as (
        cluster,
        coordinator,
    ):
        stop = frozenset[int]()
        if case.output is not None:
            stop = frozenset({expected(hashed_token, make_request(sampling=params(40)))[0][case.output - 1].token_id})
        request = make_request(sampling=params(case.limit, stop_token_ids=stop))
        running = asyncio.create_task(collect(coordinator, request))
        relay, main = cluster.worker("relay"), cluster.worker("main")
        if case.relayed or case.limit == 1:
            await _until(lambda: any(len(row.log) >= max(1, case.relayed) for row in relay.rows.values()) or running.done())
            await asyncio.sleep(0.02)  # the coordinator has it
        else:
            await _until(lambda: relay.received_bytes > 0)
        gate.set()
        if not kv_gate.is_set():
            await _until(lambda: _decided(cluster))
            kv_gate.set()
        timeline = (await running).timeline
        return Came(timeline.pipeline, timeline.decision, main.received_bytes > 0, timeline.relay_tokens)


def _decided(cluster: Cluster) -> bool:
    """The relay is let go of, or main is, or prefill pushes to main, too."""
    held = all(cluster.worker(role).rows for role in ("relay", "main"))
    return not held or len(cluster.worker("prefill").opens[0].push_to) == 2


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    ("case", "came"),
    [
        (LateMain(100, 0, relayed=0), Came("direct", "within_budget", True, 0)),
        (LateMain(100, 0, relayed=1), Came("relay", "relay_first", True, None)),
        (LateMain(100, 19, relayed=0), Came("direct", "within_budget", False, 0)),
        (LateMain(100, 19, relayed=3), Came("relay", "relay_first", False, None)),
        (LateMain(1_000_000, 0, relayed=0), Came("relay", "over_budget", True, None)),
        (LateMain(1_000_000, 0, relayed=2), Came("relay", "over_budget", True, None)),
        (LateMain(100, 0, relayed=1, whole=True), Came("relay", "relay_first", True, None)),
        (LateMain(100, 19, relayed=1, whole=True), Came("relay", "relay_first", False, None)),
        (LateMain(1_000_000, 0, relayed=1, whole=True), Came("relay", "over_budget", True, None)),
        (LateMain(100, 0, relayed=9, output=7), Came("relay", "relay_first", False, 7)),  # over, and main was not heard
        (LateMain(100, 19, relayed=5, limit=5), Came("relay", "relay_first", False, 5)),  # its last token has waited
        (LateMain(100, 0, relayed=1, limit=1), Came("direct", "within_budget", True, 0)),  # as has its only one, in vain
        (LateMain(100, 0, relayed=1, forced="relay"), Came("relay", "forced", True, None)),
        (LateMain(100, 0, relayed=2, forced="local"), Came("local", "forced", False, 120)),
    ],
)
async def test_a_relay_that_is_first_is_kept_by_both(case: LateMain, came: Came) -> None:
    simulated, text = _simulated_late(case)
    assert _beside(simulated, came) == came
    if case.output is None and came.reason == "relay_first":
        assert f"the relay made {min(case.relayed, case.limit - 1)} tokens before main answered" in text
    assert _beside(await _live_late(case), came) == came


def _beside(found: Came, wanted: Came) -> Came:
    return replace(found, relay_tokens=None) if wanted.relay_tokens is None else found


@pytest.mark.parametrize("whole", [False, True])
def test_the_border_is_the_relay_s_first_token(whole: bool) -> None:
    case = LateMain(100, 0, relayed=1, whole=whole)
    assert _simulated_late(case, -1e-4)[0].reason == "within_budget"
    after, text = _simulated_late(case, 1e-4)
    assert after.reason == "relay_first"
    assert "made 1 tokens" in text


def test_a_relay_s_row_is_taken_from_when_it_was_asked() -> None:
    """As :mod:`pdd.serving.reservation` has it: its only row is held while main has yet to answer, for a request that will be direct."""
    env, ended = simpy.Environment(), list[Outcome]()
    assert SPEC.relay is not None
    system = System(env, replace(SPEC, relay=replace(SPEC.relay, max_rows=1), link=LINK, kv_bytes_per_token=100))
    for name in ("first", "second"):
        system.submit(Request("t", Prompt(((name, PROMPT_TOKENS),)), 24, 24), ended.append)
    env.run()
    assert sorted(one.decision.reason for one in ended) == ["relay_full", "within_budget"]
