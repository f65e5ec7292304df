"""Workers without an engine: real gRPC servers on loopback that keep the Worker contract to the letter, with tokens from a given function.

A transfer is a call inside this process, completed when the receiver's gate opens. Tests hold, break and count at every point; what a
worker is told wrongly (a gap, a differing token, a reused request id) it reports as Failed, so that a wrong coordinator shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from unittest import mock

import grpc.aio

from pdd.config import LaunchConfig
from pdd.roles import Role
from pdd.serving.coordinator import Coordinator
from pdd.serving.metrics import Metrics
from pdd.serving.text.model import TextModel
from pdd.serving.worker_pool import WorkerPool
from pdd.topology import Address, Route, Topology, WorkerPlace
from pddbridge.rpc.channel import KeepAlive, bind, make_server, open_channel
from pddbridge.rpc.gen import worker_pb2 as pb
from pddbridge.rpc.gen import worker_pb2_grpc
from tests.support.scripted_row import Row
from tests.support.worker_script import KV_BYTES_PER_TOKEN, TICK_S, VOCAB_SIZE, Script, TokenFunction

# Coordinator and workers are one process: on a busy machine all of them are silent for as long. Whoever is to be lost here breaks a stream.
PATIENT = KeepAlive(timeout_s=120.0)
PATIENT_SURVIVAL: dict[str, object] = {"answer_timeout_s": 120.0, "lost_after_s": 120.0}


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """``rows``: what is held now · ``opens``, ``ingests``, ``priorities``: everything ever asked ·
    ``computed_prompt_tokens``: prompt KV computed.
    """

    def __init__(self, name: str, role: Role, site: str, kv_port: int, cluster: Cluster) -> None:
        self.name, self.role, self.site = name, role, site
        self.kv_port = kv_port
        self.cluster = cluster
        self.script = Script()
        self.rows: dict[str, Row] = {}
        self.incoming: dict[int, Row] = {}
        self.num_outgoing = 0
        self.opens: list[pb.Open] = []
        self.ingests: list[tuple[int, tuple[int, ...], bool]] = []
        self.priorities: list[tuple[str, pb.TransferPriority]] = []  # classes that pushes were given while they ran
        self.proposed = 0
        self.rewinds = 0
        self.computed_prompt_tokens = 0
        self.known: set[tuple[str, tuple[int, ...]]] = set()
        self.received_bytes = 0
        self.links: list[pb.LinkState] = []  # what it says it measured
        self.tokens_chosen: dict[str, int] = {}  # and what it says its engine counted
        self.engine_fallbacks: dict[str, int] = {}
        self.epoch = 1
        self.port = 0
        self._next_transfer = 1
        self._server: grpc.aio.Server | None = None

    @property
    def token(self) -> TokenFunction:
        return self.cluster.token

    @property
    def idle(self) -> bool:
        return not self.rows and not self.incoming and self.num_outgoing == 0

    async def start(self) -> None:
        self._server = make_server(PATIENT)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = bind(self._server, "127.0.0.1", self.port)
        await self._server.start()

    async def kill(self) -> None:
        assert self._server is not None
        await self._server.stop(grace=None)

    async def Info(self, request: pb.InfoRequest, context: grpc.aio.ServicerContext) -> pb.WorkerInfo:  # noqa: N802
        await self.script.info_gate.wait()
        return pb.WorkerInfo(
            name=self.name,
            engine="scripted",
            epoch=self.epoch,
            fingerprint=self.script.fingerprint,
            model_name="scripted",
            ready=True,
            max_context_tokens=self.script.max_context_tokens,
            kv_bytes_per_token=self.cluster.kv_bytes_per_token,
            vocab_size=VOCAB_SIZE,
            kv_dtype="float32",
            max_rows=self.script.max_rows,
            step_age_s=self.script.step_age_s,
            max_step_tokens=256,
            links=self.links,
            tokens_chosen=self.tokens_chosen,
            engine_fallbacks=self.engine_fallbacks,
        )

    async def Attach(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.WorkerCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WorkerEvent]:
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        command = first.open
        self.opens.append(command)
        if command.request_id in self.rows:
            yield pb.WorkerEvent(failed=pb.Failed(code="INTERNAL", message=f"request id {command.request_id} is in use"))
            return
        row = self.rows[command.request_id] = Row(self, command)
        tasks = [asyncio.create_task(self._commands(row, request_iterator)), asyncio.create_task(self._work(row))]
        try:
            while (event := await row.events.get()) is not None:
                yield event
            if row.broken:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        finally:
            for task in (*tasks, *([row.received] if row.received else [])):
                task.cancel()
            del self.rows[command.request_id]
            for transfer_id in [t for t, r in self.incoming.items() if r is row]:
                del self.incoming[transfer_id]

    async def _commands(self, row: Row, request_iterator: AsyncIterator[pb.WorkerCommand]) -> None:
        async for command in request_iterator:
            if command.HasField("ingest"):
                await row.ingest(command.ingest)
            elif command.HasField("seal"):
                row.seal()
            elif command.HasField("set_priority"):
                self.priorities.append((command.set_priority.target, command.set_priority.priority))
            elif command.HasField("add_target"):
                row.command.push_to.append(command.add_target)  # for who looks at what was asked
                row.targets.put_nowait(command.add_target)
        row.events.put_nowait(None)

    async def _work(self, row: Row) -> None:
        await self.script.reserve_gate.wait()
        if self.script.refuse is not None:
            row.fail(*self.script.refuse)
            return
        needed = len(row.prompt) - 1
        key = (row.command.tenant, tuple(row.prompt))
        hit = needed if key in self.known else min(self.script.hit_tokens, needed)
        if row.command.kv_source == pb.KV_SOURCE_TRANSFER:
            transfer_id = 0
            if hit < needed:
                transfer_id = self._next_transfer
                self._next_transfer += 1
                self.incoming[transfer_id] = row
            row.emit(reserved=pb.Reserved(hit_tokens=hit, transfer_id=transfer_id, epoch=self.epoch))
            if not transfer_id:
                row.emit(kv_complete=pb.KvComplete())
                row.has_kv()
            await row.propose()
            return
        row.emit(reserved=pb.Reserved(hit_tokens=hit, epoch=self.epoch))
        await self.script.prefill_gate.wait()
        if self.script.fail_prefill is not None:
            row.fail(*self.script.fail_prefill)
            return
        self.computed_prompt_tokens += needed - hit
        row.has_kv()
        row.emit(prefilled=pb.Prefilled(computed_tokens=needed - hit))
        async with asyncio.TaskGroup() as group:
            group.create_task(row.propose())
            while True:
                group.create_task(self._push(row, await row.targets.get()))

    async def _push(self, row: Row, target: pb.PushTarget) -> None:
        self.num_outgoing += 1
        try:
            receiver = self.cluster.by_kv_port(target.port)
            tokens = len(row.prompt) - 1 - target.first_token
            await receiver.script.kv_gate.wait()
            incoming = receiver.incoming.pop(target.transfer_id, None)
            if incoming is None or target.epoch != receiver.epoch or receiver.script.push_fails:
                row.emit(failed=pb.Failed(code="UNAVAILABLE", message="transfer refused", target=target.target))
                return
            num_bytes = tokens * self.cluster.kv_bytes_per_token
            receiver.received_bytes += num_bytes
            incoming.received = asyncio.create_task(incoming.receive(tokens, num_bytes))
            await self.script.pushed_event_gate.wait()
            row.emit(pushed=pb.Pushed(target=target.target, tokens=tokens, bytes=num_bytes, wire_bytes=num_bytes // 2, codec="ZSTD_PLANES"))
        finally:
            self.num_outgoing -= 1


class Cluster:
    """One prefill, one relay and one main worker (or more), and a coordinator in front of them."""

    def __init__(
        self,
        token: TokenFunction,
        roles: Sequence[tuple[str, Role, str]],
        policy: dict[str, object],
        serving: dict[str, object],
        survival: dict[str, object] | None = None,
    ) -> None:
        self.token = token
        self.kv_bytes_per_token = KV_BYTES_PER_TOKEN
        self.workers = [ScriptedWorker(name, role, site, 40000 + index, self) for index, (name, role, site) in enumerate(roles)]
        self.config = LaunchConfig.model_validate(
            {
                "model": "scripted",
                "sites": ["a", "b"],
                "links": [{"between": ["a", "b"], "emulate": {"rate_mbit_s": 40, "rtt_ms": 10}}],
                "workers": [
                    {
                        "name": w.name,
                        "role": w.role,
                        "site": w.site,
                        "engine": "torch",
                        "page_size": 16,
                        "num_pages": 64,
                        "max_context_tokens": 256,
                    }
                    for w in self.workers
                ],
                "serving": {"site": "a", "allow_override": True, **serving},
                "policy": policy,
                "survival": PATIENT_SURVIVAL if survival is None else survival,
            }
        )

    def worker(self, role: Role) -> ScriptedWorker:
        return next(w for w in self.workers if w.role == role)

    def by_kv_port(self, port: int) -> ScriptedWorker:
        return next(w for w in self.workers if w.kv_port == port)

    @property
    def topology(self) -> Topology:
        places = []
        for w in self.workers:
            control, kv = Address("127.0.0.1", w.port), Address("127.0.0.1", w.kv_port)
            places.append(WorkerPlace(w.name, w.role, w.site, control, kv, tuple(Route(site, control, kv) for site in ("a", "b"))))
        return Topology(tuple(places), Address("127.0.0.1", 1), Address("127.0.0.1", 2))

    async def wait_idle(self) -> None:
        """Every worker has let go of everything. Raises TimeoutError naming what is still held."""
        for _ in range(1000):
            if all(w.idle for w in self.workers):
                return
            await asyncio.sleep(TICK_S)
        raise TimeoutError({w.name: (list(w.rows), list(w.incoming), w.num_outgoing) for w in self.workers})


THREE_WORKERS: tuple[tuple[str, Role, str], ...] = (("prefill-0", "prefill", "a"), ("relay-0", "relay", "a"), ("main-0", "main", "b"))


@contextlib.asynccontextmanager
async def serving(
    token: TokenFunction,
    *,
    roles: Sequence[tuple[str, Role, str]] = THREE_WORKERS,
    policy: dict[str, object] | None = None,
    serving: dict[str, object] | None = None,
    scripts: dict[str, Script] | None = None,
    text_model: TextModel | None = None,
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN,
    survival: dict[str, object] | None = None,
) -> AsyncIterator[tuple[Cluster, Coordinator]]:
    """A running cluster and its coordinator. On leaving, every worker must be idle and the coordinator must run nothing."""
    cluster = Cluster(token, roles, policy or {}, serving or {}, survival)
    cluster.kv_bytes_per_token = kv_bytes_per_token
    async with contextlib.AsyncExitStack() as stack:
        patient = functools.partial(open_channel, keep_alive=PATIENT)
        stack.enter_context(mock.patch("pdd.serving.worker_pool.open_channel", patient))
        for worker in cluster.workers:
            worker.script = (scripts or {}).get(worker.name, worker.script)
            await worker.start()
            stack.push_async_callback(worker.kill)
        pool = await WorkerPool.connect(cluster.topology, "a", timeout_s=60.0, survival=cluster.config.survival)
        stack.push_async_callback(pool.close)
        coordinator = Coordinator(cluster.config, pool, text_model, Metrics())
        stack.push_async_callback(coordinator.close)
        yield cluster, coordinator
        await cluster.wait_idle()
        assert coordinator.num_running == 0
        for _ in range(1000):  # the pool lets go of a stream a moment after the worker has
            if all(worker.num_held == 0 for worker in pool.workers):
                break
            await asyncio.sleep(TICK_S)
        assert all(worker.num_held == 0 for worker in pool.workers)
