"""Workers that join and leave while requests run: by name, as the operator's topology says, and never as they say themselves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from pdd.errors import Code, PddError
from pdd.serving.coordinator import Coordinator
from pdd.serving.membership import Membership, Registration
from pdd.serving.registry import registry
from pdd.serving.worker_metrics import LeaseCollector
from pdd.topology import Address, Topology, WorkerPlace
from pdd.worker.registrar import Registrar
from pddbridge.rpc.channel import open_channel
from pddbridge.rpc.gen import registry_pb2, registry_pb2_grpc
from tests.support.generation import collect, expected, hashed_token, make_request, params
from tests.support.scripted_workers import Cluster, ScriptedWorker, serving
from tests.support.worker_script import Script, opened

ROLES = (("prefill-0", "prefill", "a"), ("main-0", "main", "b"))
QUICK = {"watch_interval_s": 0.05, "answer_timeout_s": 0.5, "lost_after_s": 2.0, "lease_s": 0.5, "drain_timeout_s": 0.5}
BOUND_S = 5.0


class Operator:
    """Holds the topology file, and a clock for leases."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.now = 0.0

    def read(self) -> Topology:
        return self.topology

    def name(self, *workers: ScriptedWorker) -> None:
        """These and no others are in the topology from now on."""
        self.topology = replace(self.topology, workers=tuple(place_of(worker) for worker in workers))


def place_of(worker: ScriptedWorker) -> WorkerPlace:
    return next(place for place in replace_workers(worker.cluster, worker).workers if place.name == worker.name)


def replace_workers(cluster: Cluster, *workers: ScriptedWorker) -> Topology:
    before, cluster.workers = cluster.workers, list(workers)
    try:
        return cluster.topology
    finally:
        cluster.workers = before


def says(worker: ScriptedWorker, **otherwise: object) -> Registration:
    place = place_of(worker)
    said = Registration(place.name, worker.epoch, place.role, place.site, str(place.control), str(place.kv), worker.script.fingerprint)
    return replace(said, **otherwise)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def running(scripts: dict[str, Script] | None = None) -> AsyncIterator[tuple[Cluster, Coordinator, Membership, Operator]]:
    async with serving(hashed_token, roles=ROLES, scripts=scripts, survival=QUICK) as (cluster, coordinator):
        operator = Operator(cluster.topology)
        yield cluster, coordinator, Membership(coordinator._pool, operator.read, lambda: operator.now), operator


@contextlib.asynccontextmanager
async def one_more(cluster: Cluster, name: str, script: Script | None = None) -> AsyncIterator[ScriptedWorker]:
    """A main worker that nobody knows yet."""
    worker = ScriptedWorker(name, "main", "b", 40000 + len(cluster.workers), cluster)
    worker.script = script or worker.script
    await worker.start()
    cluster.workers.append(worker)
    try:
        yield worker
    finally:
        await worker.kill()


async def until_usable(coordinator: Coordinator, name: str) -> None:
    async with asyncio.timeout(BOUND_S):
        while not any(worker.name == name and worker.usable for worker in coordinator._pool.workers):
            await asyncio.sleep(0.01)


async def answered(coordinator: Coordinator, name: str, num_tokens: int = 8) -> None:
    request = make_request(name, sampling=params(num_tokens), pipeline="direct")
    assert list((await collect(coordinator, request)).records) == expected(hashed_token, request)[0]


async def test_a_worker_that_the_operator_names_joins_by_registering_and_takes_requests() -> None:
    async with running() as (cluster, coordinator, membership, operator), one_more(cluster, "main-1") as joining:
        with pytest.raises(PddError) as caught:
            await membership.register(says(joining))
        assert caught.value.code is Code.NOT_FOUND
        operator.name(*cluster.workers)
        assert await membership.register(says(joining)) is False
        await until_usable(coordinator, "main-1")
        coordinator._pool.worker("main-0").draining = True
        await answered(coordinator, "r")
        assert len(joining.opens) == 1
        assert joining.received_bytes > 0, "prefill pushed to it"
        assert membership.num_by_verdict == {"refused": 1, "joined": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [("role", "relay"), ("site", "a"), ("control", "10.0.0.1:1"), ("kv", "10.0.0.1:2"), ("fingerprint", "other")],
)
async def test_what_a_worker_says_of_itself_is_compared_and_refused_with_both_values(field: str, value: str) -> None:
    async with running() as (cluster, coordinator, membership, operator), one_more(cluster, "main-1") as joining:
        operator.name(*cluster.workers)
        right = getattr(says(joining), field)
        with pytest.raises(PddError) as caught:
            await membership.register(says(joining, **{field: value}))
        assert caught.value.code is Code.INVALID_ARGUMENT
        assert value in caught.value.message
        assert right in caught.value.message
        assert [worker.name for worker in coordinator._pool.workers] == ["prefill-0", "main-0"]


async def test_a_worker_of_another_model_is_not_let_in_whatever_it_says() -> None:
    async with running() as (cluster, coordinator, membership, operator), one_more(cluster, "main-1", Script(fingerprint="other")):
        operator.name(*cluster.workers)
        with pytest.raises(PddError, match="fingerprint of prefill-0 is same, fingerprint of main-1 is other"):
            await membership.follow_topology(1.0)
        assert [worker.name for worker in coordinator._pool.workers] == ["prefill-0", "main-0"]


async def test_a_replaced_process_does_not_get_its_lease_back() -> None:
    async with running() as (cluster, _, membership, _):
        main = cluster.workers[1]
        await membership.register(says(main))
        await membership.register(says(main, epoch=77))
        with pytest.raises(PddError) as caught:
            await membership.register(says(main))
        assert caught.value.code is Code.UNAVAILABLE
        assert membership.num_by_verdict == {"joined": 1, "replaced": 1, "stale": 1}
        assert membership.lease_left_s("main-0") == QUICK["lease_s"]


async def test_a_worker_that_registers_while_the_topology_is_read_joins_once_and_keeps_what_it_holds() -> None:
    async with running() as (cluster, coordinator, membership, operator), one_more(cluster, "main-1") as joining:
        operator.name(*cluster.workers)
        gate = joining.script.info_gate = opened(False)
        both = [asyncio.create_task(membership.follow_topology(BOUND_S)), asyncio.create_task(membership.register(says(joining)))]
        await asyncio.sleep(0.1)
        gate.set()
        await asyncio.gather(*both)
        await until_usable(coordinator, "main-1")
        await asyncio.sleep(0.2)
        assert [worker.name for worker in coordinator._pool.workers] == ["prefill-0", "main-0", "main-1"]
        assert coordinator._pool.worker("main-1").counts.hung == {}
        assert coordinator._pool.worker("main-1").usable


async def test_a_lease_that_runs_out_loses_a_worker_that_does_not_answer_either() -> None:
    hanging = Script(info_gate=opened(True))
    async with running({"main-0": hanging}) as (cluster, coordinator, membership, operator):
        main = coordinator._pool.worker("main-0")
        await membership.register(says(cluster.workers[1]))
        operator.now = 10.0
        membership.expire()
        assert main.ready, "it answers"
        hanging.info_gate.clear()
        async with asyncio.timeout(BOUND_S):
            while main.ready:
                membership.expire()
                await asyncio.sleep(0.02)
        hanging.info_gate.set()
        await until_usable(coordinator, "main-0")


async def test_draining_lets_requests_finish_and_sends_new_ones_elsewhere() -> None:
    slow = Script(step_s=0.02)
    async with running({"main-0": slow}) as (cluster, coordinator, membership, operator), one_more(cluster, "main-1") as other:
        operator.name(*cluster.workers)
        await membership.follow_topology(BOUND_S)
        first = asyncio.create_task(answered(coordinator, "first", num_tokens=12))
        while not cluster.workers[1].rows:
            await asyncio.sleep(0.001)
        draining = asyncio.create_task(membership.drain("main-0"))
        await asyncio.sleep(0.02)
        await answered(coordinator, "second")
        await first
        await asyncio.wait_for(draining, BOUND_S)
        assert len(cluster.workers[1].opens) == 1
        assert len(other.opens) == 1, "the first was not moved"
        operator.name(cluster.workers[0], other)
        await membership.follow_topology(BOUND_S)
        assert [worker.name for worker in coordinator._pool.workers] == ["prefill-0", "main-1"]
        await answered(coordinator, "third")
        with pytest.raises(PddError, match="no worker 'main-0'"):
            await membership.drain("main-0")


async def test_a_request_that_outlasts_the_drain_is_moved_and_stays_whole() -> None:
    endless = Script(silent_at=4)
    async with running({"main-0": endless}) as (cluster, coordinator, membership, operator), one_more(cluster, "main-1") as other:
        operator.name(*cluster.workers)
        await membership.follow_topology(BOUND_S)
        first = asyncio.create_task(answered(coordinator, "first", num_tokens=12))
        while not cluster.workers[1].rows:
            await asyncio.sleep(0.001)
        began_s = time.monotonic()
        await asyncio.wait_for(membership.drain("main-0"), BOUND_S)
        assert time.monotonic() - began_s >= QUICK["drain_timeout_s"]
        await first
        assert len(other.opens) == 1
        main = coordinator._pool.worker("main-0")
        assert main.counts.moved == 1
        assert main.breaker.state == "closed", "it is not to blame"


async def test_over_the_wire_a_registrar_joins_renews_and_leaves() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        at = Address("127.0.0.1", free.getsockname()[1])
    async with running() as (cluster, coordinator, membership, operator), one_more(cluster, "main-1") as joining:
        registrar = Registrar(open_channel(at.host, at.port), place_of(joining), joining.epoch, "same")
        told: list[bool] = []
        task = asyncio.create_task(registrar.run(lambda: told.append(True)))
        await asyncio.sleep(0.1)  # nobody is there yet
        operator.name(*cluster.workers)
        async with registry(membership, QUICK["lease_s"], at, None):
            await until_usable(coordinator, "main-1")
            async with asyncio.timeout(BOUND_S):
                while membership.num_by_verdict["renewed"] < 2:
                    await asyncio.sleep(0.02)
            (left, registrations) = LeaseCollector(membership, coordinator._pool).collect()
            assert [(s.labels["worker"], 0 < s.value <= QUICK["lease_s"]) for s in left.samples] == [("main-1", True)]
            assert {s.labels["verdict"] for s in registrations.samples} >= {"joined", "renewed"}
            coordinator._pool.worker("main-1").draining = True
            async with asyncio.timeout(BOUND_S):
                while not told:
                    await asyncio.sleep(0.02)
            coordinator._pool.worker("main-1").draining = False
            task.cancel()
            await registrar.close()
            assert coordinator._pool.worker("main-1").status == "draining", "it said that it leaves"
            assert membership.lease_left_s("main-1") is None
            async with open_channel(at.host, at.port) as channel:
                stub = registry_pb2_grpc.RegistryStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.Register(registry_pb2.RegisterRequest(name="stranger", epoch=1), timeout=5.0)
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
