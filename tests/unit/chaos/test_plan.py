"""A plan follows from its seed alone, and seeds together reach everything that chaos is made of."""

from __future__ import annotations

import itertools

from pdd.chaos.bodies import grpc_body, http_body
from pdd.chaos.plan import LINK_KINDS, draw_plan
from pdd.chaos.shapes import SHAPES, shape_names
from pdd.serving.openai.schemas import PddOptions

NAMES = tuple(SHAPES)
PLANS = [draw_plan(seed, 20, NAMES) for seed in range(60)]
ASKS = [ask for plan in PLANS for ask in plan.asks]
FAULTS = [fault for plan in PLANS for fault in plan.faults]


def test_a_seed_decides_everything() -> None:
    assert draw_plan(7, 20, NAMES) == PLANS[7]
    assert draw_plan(7, 20, NAMES).text() == PLANS[7].text()
    assert len({plan.text().split("\n", 1)[1] for plan in PLANS}) == len(PLANS)
    assert len(PLANS[7].text().splitlines()) == 1 + len(PLANS[7].faults) + 20


def test_seeds_reach_every_fault_and_victim_in_every_shape() -> None:
    kinds = {(fault.kind, fault.victim.split("-")[0]) for fault in FAULTS}
    assert {("kill", part) for part in ("prefill", "relay", "main", "coordinator", "link")} <= kinds
    assert {("pause", part) for part in ("prefill", "relay", "main", "coordinator")} <= kinds
    assert any(fault.kind == "pause" and fault.lasts_s > 10 for fault in FAULTS)
    assert {(kind, "link") for kind in LINK_KINDS} <= kinds
    assert {plan.shape for plan in PLANS} == set(NAMES)
    for plan in PLANS:
        known = {*SHAPES[plan.shape].workers, "coordinator", "link"}
        assert {fault.victim for fault in plan.faults} <= known
        for fault in plan.faults:
            assert fault.moment.request is None or plan.asks[fault.moment.request].max_tokens > fault.moment.tokens


def test_traffic_has_every_kind_of_request() -> None:
    facts = {
        "http": any(ask.door == "http" and ask.stream for ask in ASKS),
        "whole": any(ask.door == "http" and not ask.stream for ask in ASKS),
        "grpc": any(ask.door == "grpc" for ask in ASKS),
        "one token": any(ask.max_tokens == 1 for ask in ASKS),
        "one prompt token": any(len(ask.prompt) == 1 for ask in ASKS),
        "stop": any(ask.stop for ask in ASKS),
        "sampled": any(ask.wish.temperature for ask in ASKS),
        "greedy": any(ask.wish.temperature == 0.0 for ask in ASKS),
        "leaves by tokens": any(ask.cancel and ask.cancel.after_tokens for ask in ASKS),
        "leaves by time": any(ask.cancel and ask.cancel.after_s for ask in ASKS),
        "handoff": any(ask.handoff_at is not None for ask in ASKS),
        "a prompt again": any(len({ask.prompt for ask in plan.asks}) < len(plan.asks) for plan in PLANS),
        "a common beginning": any(a.prompt[:40] == b.prompt[:40] for plan in PLANS for a, b in itertools.combinations(plan.asks, 2)),
    }
    assert all(facts.values()), [name for name, there in facts.items() if not there]


def test_both_doors_are_asked_for_the_same() -> None:
    for ask in ASKS[:100]:
        http, grpc = http_body(ask), grpc_body(ask)
        assert http["prompt"] == list(grpc.token_ids.ids)
        for name in ("seed", "max_tokens", "temperature", "ignore_eos", "cache_salt"):
            assert http[name] == getattr(grpc, name) or abs(float(str(http[name])) - getattr(grpc, name)) < 1e-6
        assert ("top_k" in http) == grpc.HasField("top_k")
        assert http.get("stop", []) == list(grpc.stop)
        options = PddOptions.model_validate(http["pdd"])
        assert options.pipeline == (grpc.override.pipeline or None)
        assert options.handoff_at == (grpc.override.handoff_at if grpc.override.HasField("handoff_at") else None)
        assert ask.params().max_tokens == ask.max_tokens


def test_shapes_are_named_in_their_order() -> None:
    assert shape_names("wide,lean") == ["lean", "wide"]
