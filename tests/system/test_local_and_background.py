"""Long prompts over a slow link through real processes: a singular one never crosses it, a relayed one arrives behind its request."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pdd.launch.local import Deployment
from pddbridge.sampling_params import SamplingParams
from tests.support.clients import Streamed, body_of, complete_all
from tests.support.deployments import assert_idle, launch_config, ledger
from tests.system.conftest import Running

pytestmark = pytest.mark.system

# 3 layers, k and v, 3 heads of 16 dims, float32: 400 tokens are 461 kB, four seconds over 1 Mbit/s
KV_BYTES_PER_TOKEN = 3 * 2 * 3 * 16 * 4
ARRIVES_WITHIN_S = 30.0
LENGTH = 305  # all of it but the last token are whole pages of 16, which caches keep
POLICY = {
    "pipeline": "auto",
    "direct_budget_s": 0.2,
    "local": {"min_miss_tokens": 200, "max_output_tokens": 8, "max_share": 1.0, "window": 10},
    "background": {"min_tokens": 100, "max_candidates": 0},
}


@pytest.fixture(scope="module")
def slow(tiny_model: Path, cache_dir: Path) -> Iterator[Running]:
    config = launch_config(str(tiny_model), engines=("torch", "torch", "torch"), rate_mbit_s=1.0, policy=POLICY)
    with Deployment(config, cache_dir) as deployment:
        deployment.start()
        yield Running(deployment, str(tiny_model), tiny_model)
        assert_idle(deployment)


def ask(running: Running, length: int, seed: int, max_tokens: int, **pdd: object) -> Streamed:
    rng = random.Random(seed)
    prompt = [rng.randrange(4, 260) for _ in range(length)]
    params = SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    (answer,) = complete_all(running.url, [body_of(running.model, prompt, params, **pdd)])
    assert answer.error is None
    assert answer.done
    assert len(answer.ids) == max_tokens
    return answer


def received(running: Running) -> int:
    return ledger(running.deployment, "main-0").kv_bytes_received


def test_a_singular_request_ends_on_the_relay_and_its_transfer_is_cut(slow: Running):
    # So that the relay's pace is known; its own transfer is stopped, too short to go on.
    taught = ask(slow, 60, seed=1, max_tokens=30, pipeline="relay")
    assert taught.number("relay_tokens") > 5
    assert_idle(slow.deployment)
    before = received(slow)
    answer = ask(slow, 400, seed=2, max_tokens=6)
    assert (answer.timeline["pipeline"], answer.timeline["decision"]) == ("local", "singular"), answer.timeline["pipeline_reason"]
    assert set(answer.origins) == {"relay"}
    assert (answer.timeline["transfer"], answer.number("wan_kv_bytes")) == ("cut", 0)
    assert answer.number("wan_kv_saved_bytes") == 399 * KV_BYTES_PER_TOKEN
    assert answer.number("e2e_s") < 399 * KV_BYTES_PER_TOKEN / 125_000, "sooner than its KV could have crossed"
    assert_idle(slow.deployment)
    assert received(slow) == before
    (decision,) = [d for d in decisions(slow) if d["pipeline"] == "local"]
    assert (decision["outcome"], decision["output_tokens"], decision["within_output"]) == ("length", 6, True)
    direct = ask(slow, 400, seed=2, max_tokens=6, pipeline="direct")
    assert direct.ids == answer.ids


def test_a_relayed_request_s_transfer_completes_behind_it_and_the_next_one_hits(slow: Running):
    before = received(slow)
    first = ask(slow, LENGTH, seed=3, max_tokens=4, pipeline="relay")
    assert set(first.origins) == {"relay"}
    assert (first.timeline["transfer"], first.timeline["transfer_reason"]) == ("background", "valuable")
    deadline_s = time.monotonic() + ARRIVES_WITHIN_S
    while received(slow) - before < (LENGTH - 1) * KV_BYTES_PER_TOKEN:
        assert time.monotonic() < deadline_s, received(slow) - before
        time.sleep(0.05)
    assert_idle(slow.deployment)
    second = ask(slow, LENGTH, seed=3, max_tokens=4)
    assert second.number("main_hit_tokens") == (LENGTH - 1)
    # The relay has the prompt, too, and is near: its first token may be there before main has answered.
    assert (second.timeline["pipeline"], second.timeline["decision"]) in (("direct", "within_budget"), ("relay", "relay_first"))
    assert (second.number("relay_tokens") > 0) == (second.timeline["pipeline"] == "relay")
    assert second.ids == first.ids
    assert received(slow) - before == (LENGTH - 1) * KV_BYTES_PER_TOKEN
    metrics = httpx.get(f"{slow.url}/metrics", timeout=30).text
    assert 'pdd:background_transfers_total{outcome="complete"} 1.0' in metrics
    assert "pdd:prefix_hit_rate_gap " in metrics


def decisions(running: Running) -> list[dict[str, object]]:
    return httpx.get(f"{running.url}/debug/decisions", timeout=30).json()["data"]
