"""Faults that users of such systems reported, through the public API: what happens to ends, stops, counts and records at the handoff."""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pdd.launch.local import Deployment
from pdd.serving.text.model import TextModel
from pddbridge.sampling_params import SamplingParams
from tests.support.clients import Streamed, body_of, complete_all
from tests.support.deployments import assert_idle, launch_config, ledger
from tests.support.tiny_models import IM_END_ID
from tests.system.conftest import Running

pytestmark = pytest.mark.system

PROMPT = list(range(40, 81))
_salts = itertools.count()


def run(running: Running, params: SamplingParams, extra: dict[str, object] | None = None, **pdd: object) -> Streamed:
    """One cold request; it ended cleanly and everybody let go of it. Where main made a token, it had all KV of the prompt from prefill."""
    body = {**body_of(running.model, PROMPT, params, **pdd), "cache_salt": f"case-{next(_salts)}", **(extra or {})}
    (answer,) = complete_all(running.url, [body])
    assert answer.error is None
    assert answer.done
    assert len(answer.finish_reasons) == 1
    assert answer.usage["completion_tokens"] == len(answer.ids)
    assert answer.number("fallbacks") == answer.number("main_prefill_tokens") == answer.number("main_hit_tokens") == 0
    if "main" in answer.origins:
        assert answer.number("wan_kv_tokens") == len(PROMPT) - 1
        assert answer.number("wan_kv_bytes") > 0
    assert_idle(running.deployment)
    return answer


@pytest.mark.parametrize("pipeline", ["direct", "relay"])
def test_41_first_token_ends_the_request(tiny: Running, pipeline: str):
    params = SamplingParams(seed=1, max_tokens=20, temperature=0.0, logit_bias=((IM_END_ID, 100.0),))
    answer = run(tiny, params, pipeline=pipeline)
    assert answer.ids == [IM_END_ID]
    assert answer.finish_reasons == ["stop"]
    assert answer.text == ""


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("handoff_at", [0, 1, 2])
def test_42_handed_over_tokens_count_against_max_tokens(tiny: Running, max_tokens: int, handoff_at: int):
    params = SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    answer = run(tiny, params, pipeline="relay", handoff_at=handoff_at)
    assert len(answer.ids) == max_tokens
    assert answer.finish_reasons == ["length"]
    first = answer.ids[0]
    stopped = run(
        tiny, SamplingParams(seed=1, max_tokens=9, temperature=0.0, stop_token_ids=frozenset({first})), pipeline="relay", handoff_at=1
    )
    assert stopped.ids == [first]
    assert stopped.finish_reasons == ["stop"]


def test_43_ignore_eos_holds_on_both_sides(tiny: Running):
    params = SamplingParams(seed=1, max_tokens=5, temperature=0.0, ignore_eos=True, logit_bias=((IM_END_ID, 100.0),))
    answer = run(tiny, params, pipeline="relay", handoff_at=1)
    assert answer.ids == [IM_END_ID] * 5
    assert answer.finish_reasons == ["length"]


@pytest.mark.parametrize("min_tokens", range(6))
@pytest.mark.parametrize("handoff_at", [0, 2, 5])
def test_67_min_tokens_counts_generated_tokens_only(tiny: Running, min_tokens: int, handoff_at: int):
    params = SamplingParams(seed=1, max_tokens=12, min_tokens=min_tokens, temperature=0.0, logit_bias=((IM_END_ID, 100.0),))
    answer = run(tiny, params, pipeline="relay", handoff_at=handoff_at)
    assert answer.ids[-1] == IM_END_ID
    assert len(answer.ids) == min_tokens + 1
    assert answer.finish_reasons == ["stop"]


@pytest.mark.parametrize("handoff_at", range(4))
def test_45_every_token_carries_its_logprobs(tiny: Running, handoff_at: int):
    params = SamplingParams(seed=1, max_tokens=8, temperature=0.0, ignore_eos=True)
    answer = run(tiny, params, {"logprobs": 20}, pipeline="relay", handoff_at=handoff_at)
    alone = run(tiny, params, {"logprobs": 20}, pipeline="direct")
    got, want = ([value for part in a.logprobs for value in part["token_logprobs"]] for a in (answer, alone))  # type: ignore[index]
    assert len(got) == len(want) == 8
    assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(got, want, strict=True))
    tops, want_tops = ([top for part in a.logprobs for top in part["top_logprobs"]] for a in (answer, alone))  # type: ignore[index]
    assert len(tops) == len(want_tops) == 8
    for top, want_top in zip(tops, want_tops, strict=True):
        assert len(top) >= 15, "ids that decode to the same text share an entry in this shape"
        common = top.keys() & want_top.keys()
        assert len(common) >= len(want_top) - 1, "the last of them may be a tie"
        assert all(math.isclose(top[text], want_top[text], abs_tol=1e-4) for text in common)


def answer_with_clean_stop_string(running: Running) -> tuple[SamplingParams, Streamed, str, str]:
    """A seed whose tokens 5..8 are a string that does not occur before: its params, the free answer, the text before, the stop string."""
    text = TextModel.load(running.model_dir)
    for seed in range(200):
        params = SamplingParams(
            seed=seed, max_tokens=16, temperature=1.0, ignore_eos=True, logit_bias=tuple((i, 8.0) for i in range(36, 126))
        )
        free = run(running, params, pipeline="direct")
        pieces = [text.token_text(token) for token in free.ids]
        before, stop = "".join(pieces[:5]), "".join(pieces[5:8])
        if "".join(pieces) == free.text and stop not in before and len(stop) >= 3:
            return params, free, before, stop
    raise AssertionError("no seed gives a clean stop string")


@pytest.mark.parametrize("handoff_at", range(4, 9))
def test_48_49_a_stop_string_across_the_handoff_never_leaks(tiny: Running, handoff_at: int):
    """The stop string lies across the boundary: cut exactly there, nothing of it streamed, main is stopped, later ids are not counted."""
    params, free, before, stop = answer_with_clean_stop_string(tiny)
    answer = run(tiny, params, {"stop": [stop]}, pipeline="relay", handoff_at=handoff_at)
    assert answer.text == before
    assert answer.finish_reasons == ["stop"]
    assert answer.ids == free.ids[: len(answer.ids)]
    assert len(answer.ids) <= 8
    unfinished = run(tiny, params, {"stop": [stop + "\x01never"]}, pipeline="relay", handoff_at=handoff_at)
    assert unfinished.text == free.text, "a prefix of a stop string that never completes is released"


@pytest.mark.parametrize("handoff_at", [0, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)])
def test_the_same_holds_while_both_decode(tiny: Running, handoff_at: int):
    """Cases 41, 43, 45, 48 and 67 in an overlap."""
    course = {"pipeline": "relay", "handoff": "overlap", "handoff_at": handoff_at}
    ends_at_once = SamplingParams(seed=1, max_tokens=20, temperature=0.0, logit_bias=((IM_END_ID, 100.0),))
    answer = run(tiny, ends_at_once, **course)
    assert (answer.ids, answer.finish_reasons, answer.text) == ([IM_END_ID], ["stop"], "")
    answer = run(tiny, replace(ends_at_once, min_tokens=7), **course)
    assert len(answer.ids) == 8
    answer = run(tiny, replace(ends_at_once, max_tokens=5, ignore_eos=True), **course)
    assert (answer.ids, answer.finish_reasons) == ([IM_END_ID] * 5, ["length"])
    plain = SamplingParams(seed=1, max_tokens=40, temperature=0.0, ignore_eos=True)
    answer, alone = run(tiny, plain, {"logprobs": 3}, **course), run(tiny, plain, {"logprobs": 3}, pipeline="direct")
    got, want = ([value for part in a.logprobs for value in part["token_logprobs"]] for a in (answer, alone))  # type: ignore[index]
    assert len(got) == 40
    assert all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(got, want, strict=True))
    params, free, before, stop = answer_with_clean_stop_string(tiny)
    answer = run(tiny, params, {"stop": [stop]}, **course)
    assert (answer.text, answer.finish_reasons) == (before, ["stop"])
    assert answer.ids == free.ids[: len(answer.ids)]


def test_44_usage_counts_each_token_once(tiny: Running):
    params = SamplingParams(seed=1, max_tokens=9, temperature=0.0, ignore_eos=True)
    for handoff_at in range(5):
        answer = run(tiny, params, pipeline="relay", handoff_at=handoff_at)
        assert answer.usage["completion_tokens"] == len(answer.ids) == 9
        assert answer.usage["prompt_tokens"] == len(PROMPT)


@pytest.fixture(scope="module")
def unequal(tiny_model: Path, cache_dir: Path) -> Iterator[Running]:
    """Site a takes 64 tokens, site b 48."""
    config = launch_config(str(tiny_model), engines=("torch", "torch", "torch"), max_context=64, main_max_context=48)
    with Deployment(config, cache_dir) as deployment:
        deployment.start()
        yield Running(deployment, str(tiny_model), tiny_model)


@pytest.mark.parametrize("length", [50, 70])
def test_56_the_smaller_limit_is_checked_before_any_kv_moves(unequal: Running, length: int):
    response = httpx.post(
        f"{unequal.url}/v1/completions", json={"model": unequal.model, "prompt": [7] * length, "max_tokens": 1}, timeout=30
    )
    assert response.status_code == 400
    assert "48" in response.json()["error"]["message"]
    for name in ("prefill-0", "relay-0", "main-0"):
        found = ledger(unequal.deployment, name)
        assert found.kv_bytes_received == found.kv_bytes_sent == found.computed_prompt_tokens == 0


def test_55_a_broken_prefill_is_a_counted_visible_fallback(tiny_model: Path, cache_dir: Path):
    """Prefill is killed: main recomputes, the answer is the same, the fallback is counted in the timeline and in /metrics."""
    config = launch_config(str(tiny_model), engines=("torch", "torch", "torch"))
    params = SamplingParams(seed=1, max_tokens=10, temperature=0.0, ignore_eos=True)
    with Deployment(config, cache_dir) as deployment:
        deployment.start()
        running = Running(deployment, str(tiny_model), tiny_model)
        healthy = run(running, params, pipeline="relay", handoff_at=3)
        assert healthy.number("fallbacks") == 0
        os.kill(deployment.processes["prefill-0"].pid, signal.SIGKILL)
        body = {**body_of(str(tiny_model), PROMPT, params, pipeline="relay", handoff_at=3), "cache_salt": "broken"}
        (answer,) = complete_all(deployment.http_url, [body])
        assert answer.error is None
        assert answer.ids == healthy.ids
        assert answer.number("fallbacks") >= 1
        assert answer.number("main_prefill_tokens") == len(PROMPT) - 1
        metrics = httpx.get(f"{deployment.http_url}/metrics", timeout=30).text
        counted = [line for line in metrics.splitlines() if line.startswith("pdd:fallbacks_total{")]
        assert sum(float(line.split()[-1]) for line in counted) >= 1
