"""L3 and L4 through real processes and the public API: wherever the handoff falls, the tokens are those of one engine alone.

Each answer also shows that KV crossed the link, that relay and main made the tokens they should have, and that main prefilled nothing.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pdd.conform.single_run import single_engine_runs
from pddbridge.links import nixl
from pddbridge.sampling_params import SamplingParams
from tests.support.clients import Streamed, body_of, complete_all
from tests.support.deployments import ledger, worker_address
from tests.support.oracle import greedy
from tests.system.conftest import Running

pytestmark = pytest.mark.system

GREEDY = SamplingParams(seed=1, max_tokens=40, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(seed=20261130, max_tokens=40, temperature=0.9, top_p=0.95, top_k=40, repetition_penalty=1.1, ignore_eos=True)
# 0..24 and around both page sizes: with a prompt of 47 tokens a handoff at 1, 17, 33 stands on, before or after a page edge of both sides.
HANDOFFS = (*range(25), 30, 31, 32, 33, 34)
PROMPT_LENGTHS = (47, 33, 16, 2)


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(4, 260) for _ in range(length)]


def duplicate_tokens(running: Running) -> float:
    """Proposals for positions the log had already, as /metrics counts them. A handoff that sends too little of the log shows only here."""
    (value,) = re.findall(r"^pdd:duplicate_tokens_total (\S+)$", httpx.get(f"{running.url}/metrics", timeout=30).text, re.MULTILINE)
    return float(value)


def check_moved(answer: Streamed, handoff_at: int, prompt_len: int, total: int) -> None:
    """KV moved, main prefilled nothing, and each token came from whom it should."""
    assert answer.error is None
    assert answer.finish_reasons == ["length"]
    assert answer.origins == ["relay"] * handoff_at + ["main"] * (total - handoff_at)
    assert answer.number("main_prefill_tokens") == 0
    assert answer.number("fallbacks") == 0
    assert answer.number("wan_kv_tokens") + answer.number("main_hit_tokens") == prompt_len - 1
    if answer.number("wan_kv_tokens"):
        assert answer.number("wan_kv_bytes") > 0


@pytest.mark.parametrize("which", ["tiny", "tiny_mirror"])
@pytest.mark.parametrize("mode", ["one_shot", "catch_up"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_do_not_depend_on_where_the_handoff_falls(which: str, mode: str, params: SamplingParams, request: pytest.FixtureRequest):
    running: Running = request.getfixturevalue(which)
    prompt = prompt_of(PROMPT_LENGTHS[0], seed=1)
    expected = [
        single_engine_runs(worker_address(running.deployment, name), [(prompt, params)])[0] for name in ("prefill-0", "relay-0", "main-0")
    ]
    assert expected[0] == expected[1] == expected[2]
    assert len(set(expected[0])) > 5, "a constant answer would prove nothing"
    before = duplicate_tokens(running)
    bodies = [
        {**body_of(running.model, prompt, params, pipeline="relay", handoff=mode, handoff_at=k), "cache_salt": f"{mode}-{params.seed}-{k}"}
        for k in HANDOFFS
    ]
    for k, answer in zip(HANDOFFS, complete_all(running.url, bodies), strict=True):
        assert answer.ids == expected[0], f"handoff at {k}"
        check_moved(answer, k, len(prompt), params.max_tokens)
        assert answer.number("wan_kv_tokens") == len(prompt) - 1
    assert duplicate_tokens(running) == before, "main went on exactly where the relay had stopped: no position was proposed twice"


@pytest.mark.parametrize(
    ("which", "params", "positions"),
    [
        pytest.param("tiny", GREEDY, (0, 1, 16, 17, 33), id="tiny-greedy"),
        pytest.param("tiny", SAMPLED, HANDOFFS, id="tiny-sampled", marks=pytest.mark.slow),
        pytest.param("tiny_mirror", GREEDY, HANDOFFS, id="mirror-greedy", marks=pytest.mark.slow),
        pytest.param("tiny_mirror", SAMPLED, HANDOFFS, id="mirror-sampled", marks=pytest.mark.slow),
    ],
)
def test_tokens_do_not_depend_on_where_an_overlap_begins(
    which: str, params: SamplingParams, positions: tuple[int, ...], request: pytest.FixtureRequest
):
    """Both decode from there, and whoever is first counts: the tokens are the same, nobody is rewound, main prefilled nothing."""
    running: Running = request.getfixturevalue(which)
    prompt = prompt_of(PROMPT_LENGTHS[0], seed=1)
    params = replace(params, max_tokens=400)  # the relay of a tiny model makes hundreds before main has its KV
    (expected,) = single_engine_runs(worker_address(running.deployment, "main-0"), [(prompt, params)])
    course = {"pipeline": "relay", "handoff": "overlap"}
    bodies = [
        {**body_of(running.model, prompt, params, **course, handoff_at=k), "cache_salt": f"overlap-{params.seed}-{k}"} for k in positions
    ]
    answers = complete_all(running.url, bodies, at_once=1)
    for k, answer in zip(positions, answers, strict=True):
        assert answer.error is None
        assert answer.ids == expected, f"overlap from {k}"
        assert answer.origins == sorted(answer.origins, reverse=True), "relay first, then main, never back"
        assert answer.origins.count("relay") >= k
        for counted in ("main_prefill_tokens", "fallbacks", "handoff_rewinds"):
            assert answer.number(counted) == 0
        assert answer.number("wan_kv_tokens") == len(prompt) - 1
    # Which of them main comes to end is the machine's affair: the relay of a tiny model may be through before main has begun.
    assert any(answer.origins[-1] == "main" for answer in answers), "or nothing was handed over"


@pytest.mark.parametrize("which", ["tiny", "tiny_mirror"])
@pytest.mark.parametrize("length", PROMPT_LENGTHS[1:])
def test_prompt_lengths_around_page_edges(which: str, length: int, request: pytest.FixtureRequest):
    running: Running = request.getfixturevalue(which)
    prompt = prompt_of(length, seed=2)
    params = SamplingParams(seed=5, max_tokens=36, temperature=0.0, ignore_eos=True)
    expected = single_engine_runs(worker_address(running.deployment, "main-0"), [(prompt, params)])[0]
    handoffs = (0, 1, 15, 16, 17, 31)
    bodies = [
        {**body_of(running.model, prompt, params, pipeline="relay", handoff="one_shot", handoff_at=k), "cache_salt": f"edge-{length}-{k}"}
        for k in handoffs
    ]
    for k, answer in zip(handoffs, complete_all(running.url, bodies), strict=True):
        assert answer.ids == expected, f"handoff at {k}"
        check_moved(answer, k, length, params.max_tokens)


def test_direct_pipeline_gives_the_same_tokens(tiny: Running):
    prompt = prompt_of(47, seed=3)
    expected = single_engine_runs(worker_address(tiny.deployment, "relay-0"), [(prompt, GREEDY)])[0]
    (answer,) = complete_all(tiny.url, [{**body_of(tiny.model, prompt, GREEDY, pipeline="direct"), "cache_salt": "direct"}])
    assert answer.ids == expected
    check_moved(answer, 0, len(prompt), GREEDY.max_tokens)


def test_kv_takes_the_local_link_within_the_site_and_tcp_between_sites(tiny: Running):
    prompt = prompt_of(47, seed=13)
    before = ledger(tiny.deployment, "prefill-0")
    body = body_of(tiny.model, prompt, GREEDY, pipeline="relay", handoff_at=7)
    (answer,) = complete_all(tiny.url, [{**body, "cache_salt": "links"}])
    check_moved(answer, 7, len(prompt), GREEDY.max_tokens)
    after = ledger(tiny.deployment, "prefill-0")
    local = "nixl" if nixl.installed() else "shm"
    assert {link: after.kv_pushes[link] - before.kv_pushes[link] for link in (local, "tcp")} == {local: 1, "tcp": 1}
    assert [reason for reason in after.kv_link_fallbacks if not reason.startswith("native_")] == []  # the processor's affair


def test_rows_of_one_batch_do_not_disturb_each_other(tiny: Running):
    """Cases 60, 68, 100: different lengths and seeds in flight together; each equals its solo run, many tokens long."""
    jobs = []
    for index, length in enumerate((5, 16, 33, 61)):
        prompt = prompt_of(length, seed=7)
        jobs += [(prompt, SamplingParams(seed=300 + index, max_tokens=32, temperature=1.0, ignore_eos=True))]
    jobs += [(prompt_of(33, seed=7), SamplingParams(seed=999, max_tokens=32, temperature=1.0, ignore_eos=True))]
    expected = single_engine_runs(worker_address(tiny.deployment, "relay-0"), jobs)
    assert expected[2] != expected[4], "same prompt, other seed: other tokens"
    bodies = [
        {**body_of(tiny.model, prompt, params, pipeline="relay", handoff_at=3 + index), "cache_salt": f"rows-{index}"}
        for index, (prompt, params) in enumerate(jobs)
    ]
    answers = complete_all(tiny.url, bodies, at_once=len(bodies))
    assert [answer.ids for answer in answers] == expected


@pytest.mark.parametrize("mode", ["one_shot", "auto"])
def test_natural_handoff_equals_too(tiny: Running, mode: str):
    """No forced position: the handoff falls where the link puts it."""
    prompts = [prompt_of(length, seed=11) for length in (60, 90, 120)]
    params = SamplingParams(seed=3, max_tokens=300, temperature=0.0, ignore_eos=True)
    expected = single_engine_runs(worker_address(tiny.deployment, "main-0"), [(prompt, params) for prompt in prompts])
    course = {"pipeline": "relay", **({} if mode == "auto" else {"handoff": mode})}
    bodies = [{**body_of(tiny.model, p, params, **course), "cache_salt": f"natural-{mode}-{i}"} for i, p in enumerate(prompts)]
    for prompt, want, answer in zip(prompts, expected, complete_all(tiny.url, bodies), strict=True):
        assert answer.ids == want
        assert answer.number("wan_kv_tokens") == len(prompt) - 1
        assert answer.number("main_prefill_tokens") == 0
        # Where it falls is the machine's affair; that main had its part is not, or nothing was handed over.
        assert answer.origins == sorted(answer.origins, reverse=True), "relay first, then main, never back"
        if mode == "one_shot":  # by itself an overlap is chosen, and the relay of a tiny model may win every race of it
            assert answer.origins[-1] == "main"


def test_tiny_model_equals_transformers(tiny: Running, tiny_model: Path):
    prompt = prompt_of(47, seed=1)
    ids, _ = greedy(tiny_model, prompt, 40)
    (answer,) = complete_all(tiny.url, [{**body_of(tiny.model, prompt, GREEDY, pipeline="relay", handoff_at=9), "cache_salt": "hf"}])
    assert answer.ids == ids
