"""The worker with real engines and a tiny model: prefill, relay and main give the tokens of a single-engine run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from pddbridge.engine import Engine, EngineConfig
from pddbridge.sampling_params import SamplingParams
from tests.support.tiny_models import make_tiny_llama
from tests.support.worker_harness import WorkerHarness

PROMPT = [(37 * i) % 290 + 5 for i in range(33)]
GREEDY = SamplingParams(seed=1, max_tokens=20, temperature=0.0)
SAMPLED = SamplingParams(seed=7, max_tokens=20, temperature=1.3, top_p=0.95, repetition_penalty=1.2, num_logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), num_heads=6, num_kv_heads=3, num_layers=2, max_context=128)


def engine_of(name: str, model: Path, page_size: int) -> Callable[[], Engine]:
    config = EngineConfig("cpu", "float32", "float32", page_size, 128 // page_size + 6, 128, 16, 2, 1, str(model / "compiled"))

    def make() -> Engine:
        engine: Engine = importlib.import_module(f"pdd{name}.engine").create(str(model), config)
        return engine

    return make


@pytest.mark.parametrize(
    ("site_a", "site_b"),
    [
        ("torch", "torch"),
        pytest.param("jax", "torch", marks=pytest.mark.slow),
        pytest.param("torch", "jax", marks=pytest.mark.slow),
    ],
)
async def test_handoff_at_any_token_continues_the_single_engine_run(site_a: str, site_b: str, model: Path) -> None:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(WorkerHarness("p", engine_of(site_a, model, 12)))
        relay = await stack.enter_async_context(WorkerHarness("relay", engine_of(site_a, model, 8)))
        main = await stack.enter_async_context(WorkerHarness("main", engine_of(site_b, model, 16)))
        for params in (GREEDY, SAMPLED):
            alone = main.attach().open("alone", PROMPT, params=params, tenant="alone")
            log = await alone.tokens(20)
            await alone.half_close()
            for k in (0, 1, 7, 15, 16):
                before = await main.assert_idle()
                tenant = f"{params.seed}-{k}"  # a cache of its own: everything has to be sent
                receivers = [
                    relay.attach().open("r", PROMPT, transfer=True, params=params, limit=k, tenant=tenant),
                    main.attach().open("r", PROMPT, transfer=True, decode=False, params=params, tenant=tenant),
                ]
                targets = [stream.worker.target((await stream.until("reserved")).reserved) for stream in receivers]
                sender = prefill.attach().open("r", PROMPT, decode=False, push_to=targets, params=params, tenant=tenant)
                on_relay, on_main = receivers
                relayed = await on_relay.tokens(k)
                assert relayed == log[:k]
                await on_main.until("kv_complete")
                on_main.ingest(0, relayed, decode=True)
                assert await on_main.tokens(20 - k) == log[k:]
                for stream in (on_relay, on_main, sender):
                    await stream.half_close()
                after = await main.assert_idle()
                assert after.computed_prompt_tokens == before.computed_prompt_tokens
                assert after.kv_bytes_received - before.kv_bytes_received == 32 * prefill.runtime.facts.kv_spec.bytes_per_token
        for worker in (prefill, relay, main):
            assert (await worker.ledger()).compilations_after_ready == 0


async def test_a_cached_prefix_gives_the_same_tokens_as_a_cold_run(model: Path) -> None:
    """Full pages shared, the page in which the prompts differ copied."""
    other = [*PROMPT[:21], 7, *PROMPT[22:]]
    async with WorkerHarness("w", engine_of("torch", model, 8)) as worker:
        logs = {}
        for tenant, prompts in (("cold-1", [PROMPT]), ("cold-2", [other]), ("warm", [PROMPT, other, PROMPT])):
            for prompt in prompts:
                stream = worker.attach().open("r", prompt, params=GREEDY, tenant=tenant)
                hit = (await stream.until("reserved")).reserved.hit_tokens
                logs.setdefault((tenant, tuple(prompt)), []).append((hit, await stream.tokens(20)))
                await stream.half_close()
        (_, cold), (_, other_cold) = logs["cold-1", tuple(PROMPT)][0], logs["cold-2", tuple(other)][0]
        assert logs["warm", tuple(PROMPT)] == [(0, cold), (32, cold)]
        assert logs["warm", tuple(other)] == [(21, other_cold)]
