"""What was decided, shown where overrides are allowed and nowhere else."""

from __future__ import annotations

import dataclasses
import json

import httpx

from pdd.policy.outcomes import DecisionRecord
from pdd.serving.front import Front
from pdd.serving.metrics import Metrics
from pdd.serving.openai.app import create_app
from pdd.serving.text.model import TextModel
from tests.support.doors import SERVING
from tests.support.scripted_coordinator import ScriptedCoordinator

RECORD = DecisionRecord(
    request_id="r1",
    pipeline="relay",
    reason="over_budget",
    text="predicted wait of 2.000 s is over 0.500 s",
    predicted_kv_s=2.5,
    predicted_wait_s=2.0,
    budget_s=0.5,
    predicted_relay_end_s=1.0,
    predicted_output_tokens=64,
    ttft_target_s=1.0,
    outcome="stop",
    kv_s=3.0,
    ttft_s=0.4,
    e2e_s=4.0,
    output_tokens=65,
    relay_tokens=20,
    handoff="catch_up",
    ended_on="main",
    transfer="none",
    transfer_reason="",
    wan_kv_bytes=1000,
    wan_kv_saved_bytes=0,
    redecision="",
    fallbacks=0,
    handoff_reason="backlog: more than 64 tokens are to be caught up with first",
    handoff_predicted_gap_s=0.4,
    handoff_gap_s=0.05,
)


async def get(text: TextModel, allow_override: bool) -> httpx.Response:
    serving = SERVING.model_copy(update={"allow_override": allow_override})
    front = Front(ScriptedCoordinator(text), tuple, text, serving, decisions=lambda: (RECORD,))
    transport = httpx.ASGITransport(app=create_app(front, Metrics().registry))
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        return await client.get("/debug/decisions")


async def test_the_latest_decisions_with_their_outcomes(text: TextModel) -> None:
    answer = await get(text, allow_override=True)
    assert answer.status_code == 200
    (record,) = answer.json()["data"]
    expected = {**dataclasses.asdict(RECORD), "kv_error_s": 0.5, "within_output": False, "within_target": True}
    assert record == json.loads(json.dumps(expected))


async def test_hidden_where_clients_may_override_nothing(text: TextModel) -> None:
    assert (await get(text, allow_override=False)).status_code == 404


def test_what_was_not_predicted_or_did_not_happen_is_not_judged() -> None:
    nothing = dataclasses.replace(RECORD, predicted_kv_s=None, predicted_output_tokens=None, ttft_target_s=None)
    assert (nothing.kv_error_s, nothing.within_output, nothing.within_target) == (None, None, None)
    lost = dataclasses.replace(RECORD, outcome="unavailable", kv_s=None, ttft_s=None)
    assert (lost.kv_error_s, lost.within_output, lost.within_target) == (None, None, None)
