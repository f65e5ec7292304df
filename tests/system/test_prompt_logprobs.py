"""Prompt log-probabilities through real processes, on either engine, against transformers in float32; the KV still moves."""

from __future__ import annotations

import random

import httpx
import numpy as np
import pytest

from tests.support import oracle
from tests.support.deployments import ledgers
from tests.system.conftest import Running

pytestmark = pytest.mark.system


@pytest.mark.parametrize("which", ["tiny", "tiny_mirror"])
def test_every_prompt_token_is_scored_and_main_prefills_nothing(which: str, request: pytest.FixtureRequest) -> None:
    running: Running = request.getfixturevalue(which)
    rng = random.Random(9)
    prompt = [rng.randrange(4, 260) for _ in range(101)]
    body = {"model": running.model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "echo": True, "logprobs": 3}
    body["pdd"] = {"pipeline": "direct"}  # a relay could end the answer before main has the KV
    with httpx.Client(base_url=running.url, timeout=120.0) as client:
        before = ledgers(running.deployment)
        first = client.post("/v1/completions", json=body).json()
        again = client.post("/v1/completions", json={**body, "prompt_logprobs": 1, "max_tokens": 0}).json()
        after = ledgers(running.deployment)
    logits = oracle.logits(running.model_dir, prompt).astype(np.float64)[:-1]
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = [row[token_id] for row, token_id in zip(logprobs, prompt[1:], strict=True)]
    for answer in (first, again):
        found = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert found[0] is None
        assert found[1:101] == pytest.approx(wanted, abs=1e-4)
    told = [entry[str(token_id)]["logprob"] for entry, token_id in zip(again["choices"][0]["prompt_logprobs"][1:], prompt[1:], strict=True)]
    assert told == pytest.approx(wanted, abs=1e-4)
    assert len(again["choices"][0]["logprobs"]["tokens"]) == 101
    added = {name: reply.computed_prompt_tokens - before[name].computed_prompt_tokens for name, reply in after.items()}
    # Computed for each scoring; for the KV that moved only the page that is not full, 100 % 16 = 100 % 32 tokens of it.
    assert added == {"prefill-0": 204, "relay-0": 0, "main-0": 0}
    assert after["main-0"].kv_bytes_received > before["main-0"].kv_bytes_received
    assert all(reply.compilations_after_ready == 0 for reply in after.values())
