"""Choices of one call: the prompt is computed once in the whole system and its KV crosses the wide-area link once."""

from __future__ import annotations

import random

import httpx
import pytest

from pddbridge.sampling_params import SamplingParams
from tests.support.clients import body_of
from tests.support.deployments import ledgers
from tests.system.conftest import Running

pytestmark = pytest.mark.system

PARAMS = SamplingParams(seed=5, max_tokens=24, temperature=1.0, ignore_eos=True)
NUM_CHOICES = 4
BYTES_PER_TOKEN = 3 * 2 * 3 * 16 * 4  # layers, k and v, heads, dims, float32


def ids_of(answer: dict[str, object]) -> list[list[int]]:
    choices = answer["choices"]
    assert isinstance(choices, list)
    return [choice["pdd"]["token_ids"] for choice in choices]


@pytest.mark.parametrize("pipeline", ["direct", "relay"])
def test_choices_share_one_prefill_and_one_transfer(tiny: Running, pipeline: str) -> None:
    rng = random.Random(pipeline)
    prompt = [rng.randrange(4, 260) for _ in range(75)]  # ends inside a page on either side
    handoff = {"handoff_at": 9} if pipeline == "relay" else {}
    body = body_of(tiny.model, prompt, PARAMS, pipeline=pipeline, report_origin=True, **handoff)
    with httpx.Client(base_url=tiny.url, timeout=120.0) as client:
        before = ledgers(tiny.deployment)
        together = client.post("/v1/completions", json={**body, "n": NUM_CHOICES, "cache_salt": "together"}).json()
        after = ledgers(tiny.deployment)
        alone = client.post("/v1/completions", json={**body, "cache_salt": "alone"}).json()

    def added(worker: str, what: str) -> int:
        return getattr(after[worker], what) - getattr(before[worker], what)

    kv_tokens = len(prompt) - 1
    assert {w: added(w, "computed_prompt_tokens") for w in after} == {"prefill-0": kv_tokens, "relay-0": 0, "main-0": 0}
    assert added("main-0", "kv_bytes_received") == kv_tokens * BYTES_PER_TOKEN
    assert added("relay-0", "kv_bytes_received") == (kv_tokens * BYTES_PER_TOKEN if pipeline == "relay" else 0)
    assert len({tuple(ids) for ids in ids_of(together)}) == NUM_CHOICES
    assert ids_of(together)[0] == ids_of(alone)[0]
    assert together["usage"]["prompt_tokens"] == len(prompt)
