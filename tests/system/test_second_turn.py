"""Show 5 and cases 7, 8: only what main decode lacks crosses the wide-area link, counted in bytes and tokens."""

from __future__ import annotations

import random

import pytest

from pddbridge.sampling_params import SamplingParams
from tests.support.clients import body_of, complete_all
from tests.support.deployments import assert_idle, ledger
from tests.system.conftest import Running

pytestmark = pytest.mark.system

PARAMS = SamplingParams(seed=1, max_tokens=24, temperature=0.0, ignore_eos=True)
MAIN_PAGE = 16


def kv_bytes_per_token(running: Running) -> int:
    # 3 layers, k and v, 3 heads of 16 dims, float32: from the fixture's model, not from the code under test.
    return 3 * 2 * 3 * 16 * 4


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 260) for _ in range(length)]


def test_the_second_turn_sends_only_the_missing_kv(tiny: Running):
    first_prompt = prompt_of(101, seed=1)
    (first,) = complete_all(
        tiny.url, [{**body_of(tiny.model, first_prompt, PARAMS, pipeline="relay", handoff_at=5), "cache_salt": "turns"}]
    )
    assert first.number("wan_kv_tokens") == len(first_prompt) - 1
    assert first.number("wan_kv_bytes") == (len(first_prompt) - 1) * kv_bytes_per_token(tiny)
    assert_idle(tiny.deployment)
    second_prompt = first_prompt + first.ids + prompt_of(37, seed=2)
    before = ledger(tiny.deployment, "main-0").kv_bytes_received
    (second,) = complete_all(
        tiny.url, [{**body_of(tiny.model, second_prompt, PARAMS, pipeline="relay", handoff_at=5), "cache_salt": "turns"}]
    )
    moved = ledger(tiny.deployment, "main-0").kv_bytes_received - before
    # Main has the KV of the first turn but for its last token, which was never an input; whole pages of it are in the cache.
    held = (len(first_prompt) + len(first.ids) - 1) // MAIN_PAGE * MAIN_PAGE
    assert second.number("main_hit_tokens") == held
    assert second.number("wan_kv_tokens") == len(second_prompt) - 1 - held
    assert moved == second.number("wan_kv_bytes") == (len(second_prompt) - 1 - held) * kv_bytes_per_token(tiny)
    assert second.usage["prompt_tokens_details"] == {"cached_tokens": held}
    assert second.number("main_prefill_tokens") == 0
    (cold,) = complete_all(tiny.url, [{**body_of(tiny.model, second_prompt, PARAMS, pipeline="relay", handoff_at=5), "cache_salt": "cold"}])
    assert cold.number("main_hit_tokens") == 0
    assert second.ids == cold.ids


@pytest.mark.parametrize("length", [1, 32, 33, 48, 64])
@pytest.mark.parametrize("pipeline", ["direct", "relay"])
def test_the_same_prompt_again_sends_nothing_it_has(tiny: Running, length: int, pipeline: str):
    """Cases 7 and 8: a whole hit leaves one token to run; nothing is sent; the third time still hits."""
    prompt = prompt_of(length, seed=length)
    # Forced to hand off: a relay that reaches the end before the KV is across ends the transfer, and main would hold nothing.
    course = {"pipeline": pipeline} if pipeline == "direct" else {"pipeline": pipeline, "handoff_at": 5}
    body = {**body_of(tiny.model, prompt, PARAMS, **course), "cache_salt": f"again-{length}-{pipeline}"}
    answers = []
    for _ in range(3):
        answers += complete_all(tiny.url, [body])
        assert_idle(tiny.deployment)
    assert answers[0].ids == answers[1].ids == answers[2].ids
    assert answers[0].number("main_hit_tokens") == 0
    for again in answers[1:]:
        assert again.number("main_hit_tokens") == length - 1
        assert again.number("wan_kv_bytes") == 0
        assert again.number("main_prefill_tokens") == 0


def test_prompts_that_part_inside_a_page_share_exactly_the_common_tokens(tiny: Running):
    """Case 20."""
    common = prompt_of(40, seed=5)
    one, other = common + prompt_of(30, seed=6), common + prompt_of(30, seed=7)
    assert one[40] != other[40]
    complete_all(tiny.url, [{**body_of(tiny.model, one, PARAMS, pipeline="direct"), "cache_salt": "part"}])
    assert_idle(tiny.deployment)
    (warm,) = complete_all(tiny.url, [{**body_of(tiny.model, other, PARAMS, pipeline="direct"), "cache_salt": "part"}])
    (cold,) = complete_all(tiny.url, [{**body_of(tiny.model, other, PARAMS, pipeline="direct"), "cache_salt": "part-cold"}])
    assert warm.number("main_hit_tokens") == 40
    assert warm.number("wan_kv_tokens") == len(other) - 1 - 40
    assert warm.ids == cold.ids


def test_case_118_tenants_never_share(tiny: Running):
    """Case 118 at this level: another salt is another cache."""
    prompt = prompt_of(70, seed=9)
    hits = []
    for salt in ("one", "two", "one"):
        (answer,) = complete_all(tiny.url, [{**body_of(tiny.model, prompt, PARAMS, pipeline="direct"), "cache_salt": f"tenant-{salt}"}])
        hits.append(answer.number("main_hit_tokens"))
        assert_idle(tiny.deployment)
    assert hits[:2] == [0, 0]
    assert hits[2] > 0
