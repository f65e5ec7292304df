"""What is refused when workers are connected, and how they are chosen."""

from __future__ import annotations

import asyncio

import pytest

from pdd.errors import Code, PddError
from pdd.serving.worker_pool import WorkerPool, check_fit
from pddbridge.rpc.gen import worker_pb2
from tests.support.generation import hashed_token
from tests.support.scripted_workers import THREE_WORKERS, Cluster, serving
from tests.support.worker_script import Script


async def test_a_foreign_model_is_refused_at_start_with_both_values_named() -> None:
    with pytest.raises(PddError, match="fingerprint of prefill-0 is same, fingerprint of main-0 is other") as caught:
        async with serving(hashed_token, scripts={"main-0": Script(fingerprint="other")}):
            pass
    assert caught.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("field", "values"),
    [("fingerprint", ("x", "y")), ("vocab_size", (300, 301)), ("kv_dtype", ("float32", "bfloat16")), ("kv_bytes_per_token", (4, 8))],
)
def test_every_disagreement_is_named(field: str, values: tuple[object, object]) -> None:
    infos = [worker_pb2.WorkerInfo(name=name, **{field: value}) for name, value in zip("abc", (values[0], *values), strict=True)]
    with pytest.raises(PddError, match=f"of a is {values[0]}.* of c is {values[1]}"):
        check_fit(infos)
    check_fit(infos[:2])


async def test_a_worker_that_does_not_answer_is_named() -> None:
    cluster = Cluster(hashed_token, THREE_WORKERS, {}, {})
    for worker in cluster.workers:
        await worker.start()
    topology = cluster.topology
    await cluster.worker("main").kill()
    with pytest.raises(PddError, match="main-0 is not ready after") as caught:
        await WorkerPool.connect(topology, "a", timeout_s=0.5)
    assert caught.value.code is Code.UNAVAILABLE
    for worker in cluster.workers:
        await worker.kill()


async def test_a_worker_that_comes_back_as_another_model_stays_out() -> None:
    async with serving(hashed_token) as (cluster, coordinator):
        main = cluster.worker("main")
        await main.kill()
        main.epoch, main.script.fingerprint = 2, "other"
        await main.start()
        pool = coordinator._pool
        seen = []
        for _ in range(60):
            if pool.worker("main-0").rtts_s and not pool.worker("main-0").ready:
                seen.append(pool.unhealthy())
            await asyncio.sleep(0.05)
        assert set(seen) == {("main-0",)}
        assert pool.route("main") is None


async def test_round_trips_are_measured_and_load_is_shared() -> None:
    roles = (("prefill-0", "prefill", "a"), ("main-0", "main", "b"), ("main-1", "main", "b"))
    async with serving(hashed_token, roles=roles) as (_, coordinator):
        pool = coordinator._pool
        assert all(0 < worker.rtt_s < 1 for worker in pool.workers)
        first = pool.route("main")
        first.num_held += 1
        second = pool.route("main")
        assert {first.name, second.name} == {"main-0", "main-1"}
        first.num_held -= 1
        assert pool.route("relay") is None
        assert not pool.has_role("relay")
