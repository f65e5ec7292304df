"""The real chat model through real processes: equal to transformers, and to one engine alone wherever the handoff falls. Float32 KV."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from pdd.conform.single_run import single_engine_runs
from pdd.launch.local import Deployment
from pdd.serving.text.model import TextModel
from pddbridge.sampling_params import SamplingParams
from tests.support.clients import body_of, complete_all
from tests.support.deployments import assert_idle, launch_config, worker_address
from tests.support.oracle import model as oracle_model
from tests.system.conftest import Running

pytestmark = [pytest.mark.system, pytest.mark.smollm2, pytest.mark.timeout(900)]

MODEL = "smollm2-135m"
# Two answers that differ where the oracle cannot tell the first two apart by more than this are both right.
TIE = 1e-4
HANDOFFS = (*range(25), 30, 31, 32, 33, 34)
QUESTIONS = (
    "Write a short poem about the sea.",
    "Explain why the sky is blue to a child of six.",
    "List five fruits and one fact about each.",
    "def fibonacci(n):",
    "Translate to French: I would like a cup of coffee, please.",
    "Once upon a time, in a village between two rivers,",
    "What are the main differences between a bee and a wasp? " * 6,
    "1, 2, 4, 8, 16, 32,",
)


@pytest.fixture(scope="module", params=[("jax", "jax", "torch"), ("torch", "torch", "jax")], ids=["default", "mirror"])
def running(request: pytest.FixtureRequest, smollm2_dir: Path, cache_dir: Path) -> Iterator[Running]:
    config = launch_config(MODEL, engines=request.param, max_context=1024, num_pages=256, max_step_tokens=256)
    with Deployment(config, cache_dir) as deployment:
        deployment.start()
        yield Running(deployment, MODEL, smollm2_dir)
        assert_idle(deployment)


@pytest.fixture(scope="module")
def text(smollm2_dir: Path) -> TextModel:
    return TextModel.load(smollm2_dir)


@pytest.fixture(scope="module")
def oracle(smollm2_dir: Path) -> LlamaForCausalLM:
    return oracle_model(smollm2_dir)


def prompts_of(text: TextModel) -> list[list[int]]:
    chat = [text.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS[:5]]
    return [list(ids) for ids in chat] + [list(text.encode(question, add_special=False)) for question in QUESTIONS[5:]]


@functools.cache  # the same for the default and the mirror config
def generated(model_dir: Path, prompt: tuple[int, ...]) -> list[int]:
    """What transformers' own generate makes of a prompt, greedily, 64 tokens."""
    with torch.inference_mode():
        whole = oracle_model(model_dir).generate(
            torch.tensor([prompt]), max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None
        )
    return whole[0, len(prompt) :].tolist()


def test_greedy_equals_transformers_generate(
    running: Running, text: TextModel, smollm2_dir: Path, oracle: LlamaForCausalLM, capsys: pytest.CaptureFixture[str]
):
    prompts = prompts_of(text)
    params = SamplingParams(seed=0, max_tokens=64, temperature=0.0, ignore_eos=True)
    bodies = [
        {**body_of(MODEL, prompt, params, pipeline="relay", handoff_at=20 + i), "cache_salt": "hf"} for i, prompt in enumerate(prompts)
    ]
    answers = complete_all(running.url, bodies)
    ties = 0
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.origins == ["relay"] * (20 + index) + ["main"] * (44 - index)
        assert 0 < answer.number("wan_kv_wire_bytes") <= answer.number("wan_kv_bytes")
        assert answer.number("main_prefill_tokens") == 0
        if answer.ids == generated(smollm2_dir, tuple(prompt)):
            continue
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + answer.ids])).logits[0, len(prompt) - 1 : -1].numpy()
        for position, token in enumerate(answer.ids):
            gap = float(np.max(logits[position]) - logits[position, token])
            assert gap < TIE, f"prompt {index}, token {position}: {token} is {gap} below the oracle's best"
            ties += gap > 0
    with capsys.disabled():
        print(f"\n  {len(prompts)} prompts x 64 tokens equal to transformers, {ties} near-ties (gap < {TIE})")


@pytest.mark.parametrize("mode", ["one_shot", "catch_up"])
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_every_handoff_position_gives_the_single_engine_tokens(running: Running, text: TextModel, mode: str, temperature: float):
    prompt = prompts_of(text)[1]
    params = SamplingParams(seed=42, max_tokens=38, temperature=temperature, top_p=0.95, ignore_eos=True)
    expected = single_engine_runs(worker_address(running.deployment, "main-0"), [(prompt, params)])[0]
    bodies = [
        {**body_of(MODEL, prompt, params, pipeline="relay", handoff=mode, handoff_at=k), "cache_salt": f"{mode}{temperature}{k}"}
        for k in HANDOFFS
    ]
    for k, answer in zip(HANDOFFS, complete_all(running.url, bodies, at_once=6), strict=True):
        assert answer.ids == expected, f"handoff at {k}"
        assert answer.origins == ["relay"] * k + ["main"] * (params.max_tokens - k)
        assert answer.number("wan_kv_tokens") == len(prompt) - 1
        assert answer.number("main_prefill_tokens") == 0
