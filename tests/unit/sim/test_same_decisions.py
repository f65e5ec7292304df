"""The simulator and the live coordinator decide alike: by the same functions, and to the same ends in the same situations."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.handoff_config import HandoffConfig
from pdd.policy.handoff import HandoffSnapshot, OverlapRules, Wait, next_action, reader_interval_s
from pdd.policy_config import PolicyConfig
from pdd.serving import background, begin_run, handoff_run, link_traffic, pooled_worker, worker_pool
from pdd.sim import handoff as sim_handoff
from pdd.sim import prefill as sim_prefill
from pdd.sim import system as sim_system
from pdd.sim import workers as sim_workers
from pdd.sim.cache import Prompt
from pdd.sim.request import Outcome, Request
from pdd.sim.spec import LinkSpec
from pdd.sim.system import System
from pdd.worker import step_rows
from tests.support.generation import collect, hashed_token, make_request
from tests.support.scripted_workers import THREE_WORKERS, serving
from tests.support.worker_script import Script
from tests.unit.sim.test_simulate import SPEC

PROMPT_TOKENS = 20
LINK = LinkSpec(rate_bytes_s=5e6, rtt_s=0.01, schedule="shortest")  # what the scripted cluster's config declares


def test_both_call_the_same_policies() -> None:
    assert sim_system.choose_pipeline is begin_run.choose_pipeline
    assert sim_handoff.choose_handoff is handoff_run.choose_handoff
    assert sim_system.choose_completion is background.choose_completion
    assert sim_workers.choose_worker in (getattr(worker_pool, "choose_worker", None), getattr(pooled_worker, "choose_worker", None))
    assert sim_prefill.plan_step is step_rows.plan_step
    assert sim_system.LinkQueue is link_traffic.LinkQueue


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
    assert sim_handoff.covering_s(rules, itl_s, steady_s, late_s, laid_by_s) == pytest.approx(tokens * itl_s)


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
