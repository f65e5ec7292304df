"""All workers that the coordinator may use: who is there, who fits, whether each lives, and which of a role takes a request.

Who may be there is what the topology names, and only that: it is the operator's list, re-read when a worker joins. Workers whose KV could
not be exchanged are refused, with both values named.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque

import grpc
import grpc.aio

from pdd.errors import Code, PddError
from pdd.policy.prefixes import PrefixMemory, fingerprints
from pdd.policy.routing import RoutingLimits, WorkerLoad, choose_worker
from pdd.roles import Role
from pdd.serving.pooled_worker import PooledWorker, breaker_limits
from pdd.serving.request import GenerationRequest
from pdd.survival_config import SurvivalConfig
from pdd.tls_setup import to_worker
from pdd.topology import Topology, WorkerPlace
from pddbridge.rpc.channel import open_channel
from pddbridge.rpc.gen import worker_pb2, worker_pb2_grpc
from pddbridge.tls import RpcTls

__all__ = ["PooledWorker", "WorkerPool", "check_fit"]

# Questions in a row that must go unanswered before what a worker holds is lost: one may be our own fault, after a pause of this process.
MIN_UNANSWERED = 2
# What two workers must agree on before any KV moves, with the name an operator knows it by.
_MUST_AGREE = (
    ("fingerprint", "fingerprint"),
    ("vocab_size", "vocabulary size"),
    ("kv_dtype", "KV dtype"),
    ("kv_bytes_per_token", "KV bytes per token"),
)

_DEFAULTS = SurvivalConfig()

_log = logging.getLogger(__name__)


class WorkerPool:
    """Made by ``connect``; ``close`` ends its watchers and channels. ``num_routes``: choices by (role, reason), ever."""

    def __init__(
        self,
        topology: Topology,
        site: str,
        workers: tuple[PooledWorker, ...],
        survival: SurvivalConfig,
        tls: RpcTls | None = None,
    ) -> None:
        self.topology = topology
        self.survival = survival
        self.num_routes: Counter[tuple[Role, str]] = Counter()
        self._site = site
        self._tls = tls
        self._workers = {worker.name: worker for worker in workers}
        routing = survival.routing
        self._routing = RoutingLimits(routing.affinity_slack, routing.min_prefix_tokens)
        self._prefixes = PrefixMemory(routing.prefix_chunk_tokens, routing.max_prefixes)
        self._watchers = {worker.name: asyncio.create_task(self._watch(worker)) for worker in workers}
        self._expected: dict[str, asyncio.Task[None]] = {}
        self._returned = asyncio.Event()

    @staticmethod
    async def connect(
        topology: Topology,
        site: str,
        timeout_s: float = 60.0,
        survival: SurvivalConfig = _DEFAULTS,
        patient: bool = True,
        tls: RpcTls | None = None,
    ) -> WorkerPool:
        """Reach every worker from ``site``, wait until all are warmed up, and check that they fit together.

        With ``patient`` False those that are not ready in time join when they are, as long as every role that must be there has one now: a
        coordinator that is started again serves with what is there.
        Raises PddError: UNAVAILABLE naming the workers that did not get ready in time, INVALID_ARGUMENT when two do not fit.
        """
        results = await asyncio.gather(
            *(_first_info(place, site, timeout_s, survival, tls) for place in topology.workers), return_exceptions=True
        )
        workers = tuple(result for result in results if isinstance(result, PooledWorker))
        try:
            errors = [result for result in results if isinstance(result, BaseException)]
            unexpected = next((error for error in errors if not isinstance(error, PddError)), None)
            if unexpected is not None:
                raise unexpected
            missing = {"prefill", "main"} - {worker.place.role for worker in workers}
            if errors and (patient or missing):
                raise PddError(Code.UNAVAILABLE, "; ".join(str(error) for error in errors))
            check_fit([worker.info for worker in workers])
        except BaseException:
            for worker in workers:
                await worker.channel.close(grace=None)
            raise
        pool = WorkerPool(topology, site, workers, survival, tls)
        for place, result in zip(topology.workers, results, strict=True):
            if isinstance(result, PddError):
                _log.error("going on without it for now: %s", result)
                pool.expect(place)
        return pool

    async def close(self) -> None:
        watchers = (*self._watchers.values(), *self._expected.values())
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        for worker in self.workers:
            await worker.channel.close(grace=None)

    # --- who is there

    @property
    def workers(self) -> tuple[PooledWorker, ...]:
        return tuple(self._workers.values())

    def worker(self, name: str) -> PooledWorker:
        """Raises KeyError."""
        return self._workers[name]

    async def join(self, place: WorkerPlace, timeout_s: float) -> PooledWorker:
        """Add a worker that the topology names, once it is warmed up and fits. One that is there already is returned as it is.

        Raises PddError: UNAVAILABLE when it does not get ready in time, INVALID_ARGUMENT naming both values when it does not fit.
        """
        if (known := self._workers.get(place.name)) is not None and known.place == place:
            return known
        worker = await _first_info(place, self._site, timeout_s, self.survival, self._tls)
        try:
            check_fit([*(other.info for other in self.workers if other.name != place.name), worker.info])
        except PddError:
            await worker.channel.close(grace=None)
            raise
        if (known := self._workers.get(place.name)) is not None and known.place == place:
            await worker.channel.close(grace=None)  # it registered and was read in the topology at the same time
            return known
        await self.forget(place.name)  # it was elsewhere before
        self._workers[place.name] = worker
        self._watchers[place.name] = asyncio.create_task(self._watch(worker))
        _log.info("worker %s joins as %s at %s, epoch %d", place.name, place.role, place.site, worker.info.epoch)
        self._tell_return()
        return worker

    def expect(self, place: WorkerPlace) -> None:
        """Let it join as soon as it is ready, however long that takes."""
        if place.name not in self._expected:
            self._expected[place.name] = asyncio.create_task(self._await_join(place), name=f"expect-{place.name}")

    async def _await_join(self, place: WorkerPlace) -> None:
        try:
            while True:
                try:
                    await self.join(place, self.survival.lost_after_s)
                    return
                except PddError as error:
                    _log.warning("worker %s cannot join: %s", place.name, error)
                await asyncio.sleep(self.survival.watch_interval_s)
        finally:
            self._expected.pop(place.name, None)

    async def forget(self, name: str) -> None:
        """The worker has left. What still runs there is lost. Unknown names are none of ours any more."""
        if (expected := self._expected.pop(name, None)) is not None and expected is not asyncio.current_task():
            expected.cancel()
        worker = self._workers.pop(name, None)
        if worker is None:
            return
        self._prefixes.forget(name)
        worker.lose("left", "has left")
        watcher = self._watchers.pop(name)
        if watcher is not asyncio.current_task():
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        await worker.channel.close(grace=None)
        _log.info("worker %s has left", name)

    def may_return(self, *roles: Role) -> bool:
        """Whether a worker of ``roles`` is away now, or yet to join: it may be there again by itself."""
        awaited = any(place.role in roles and place.name in self._expected for place in self.topology.workers)
        return awaited or any(worker.place.role in roles and worker.status == "lost" for worker in self.workers)

    async def next_return(self) -> None:
        """Until a worker gets ready that was not."""
        await self._returned.wait()

    def _tell_return(self) -> None:
        self._returned.set()
        self._returned = asyncio.Event()

    # --- who takes a request

    def route(
        self,
        role: Role,
        excluded: frozenset[str] = frozenset(),
        preferred: str | None = None,
        request: GenerationRequest | None = None,
        held_back: bool = False,
    ) -> PooledWorker | None:
        """A usable worker of ``role`` by :func:`pdd.policy.routing.choose_worker`; None when there is none. With ``request`` its prompt's
        beginning counts, and is remembered to be there from now on. ``held_back``: of those that get no requests for their failures.
        """
        prints: tuple[bytes, ...] = ()
        if request is not None and sum(worker.place.role == role for worker in self._workers.values()) > 1:
            prints = fingerprints(request.tenant, request.prompt_ids, self._prefixes.chunk_tokens)
        known = self._prefixes.known(prints)
        wanted = "broken" if held_back else "ready"
        loads = [
            WorkerLoad(w.name, w.place.role, w.status == wanted, w.num_held, max(1, w.info.max_rows), known.get(w.name, 0))
            for w in self.workers
        ]
        chosen = choose_worker(loads, role, excluded, preferred, self._routing)
        if chosen is None:
            return None
        if request is not None:
            self.num_routes[role, chosen.reason] += 1
            self._prefixes.sent(prints, chosen.name)
            _log.debug("request %s: %s to %s, %s: %s", request.request_id, role, chosen.name, chosen.reason, chosen.text)
        return self._workers[chosen.name]

    def has_role(self, role: Role) -> bool:
        return any(worker.place.role == role for worker in self.workers)

    def unhealthy(self) -> tuple[str, ...]:
        """Names of the workers of every role that none is left of, not counting those that get no requests for their failures; empty when
        the service can do all that it is for.
        """
        alive = {worker.place.role for worker in self.workers if worker.status in ("ready", "draining")}
        return tuple(worker.name for worker in self.workers if worker.place.role not in alive)

    def smallest_context(self) -> PooledWorker:
        """The worker with the least room for one request."""
        return min(self.workers, key=lambda worker: worker.info.max_context_tokens)

    # --- does it live

    async def _watch(self, worker: PooledWorker) -> None:
        """Keeps ``ready`` true to life, and ends the streams of a worker that will not end them itself: one that does not answer, whose
        step thread hangs, or that owes tokens. Questions go over the same connection as streams, so a link that swallows one swallows both.
        """
        survival = self.survival
        while True:
            await asyncio.sleep(survival.watch_interval_s)
            worker.drop_silent(survival.silent_after_s)
            try:
                info = await _ask(worker.stub, worker.rtts_s, survival.answer_timeout_s)
                worker.unanswered = 0
                if info.ready and info.epoch != worker.info.epoch:
                    check_fit([*(other.info for other in self.workers if other is not worker), info])
            except grpc.aio.AioRpcError as error:
                self._unanswered(worker, error.code().name)
            except PddError as error:
                if worker.ready:
                    _log.error("worker %s came back as another: %s", worker.name, error)
                worker.ready, worker.reason = False, str(error)
            else:
                self._answered(worker, info)

    def _unanswered(self, worker: PooledWorker, why: str) -> None:
        if worker.ready:
            _log.warning("worker %s does not answer: %s", worker.name, why)
        worker.ready, worker.reason = False, f"does not answer: {why}"
        worker.unanswered += 1
        silent_s = time.monotonic() - worker.told_at_s
        if silent_s >= self.survival.lost_after_s and worker.unanswered >= MIN_UNANSWERED:
            worker.lose("no_answer", f"has not answered for {silent_s:.0f} s")

    def _answered(self, worker: PooledWorker, info: worker_pb2.WorkerInfo) -> None:
        if not info.ready:  # one that still loads does not know itself yet
            worker.ready, worker.reason = False, "is not warmed up"
            return
        if info.step_age_s >= self.survival.stuck_after_s:
            message = f"its step thread has been stuck for {info.step_age_s:.0f} s"
            if worker.ready:
                _log.error("worker %s hangs: %s", worker.name, message)
            worker.told_at_s = time.monotonic()
            worker.lose("stuck", message)
            return
        was_ready = worker.ready
        if not was_ready:
            _log.info("worker %s is ready again, epoch %d", worker.name, info.epoch)
        if info.epoch != worker.info.epoch:
            self._prefixes.forget(worker.name)
        worker.came_back(info)
        if not was_ready:
            self._tell_return()


def check_fit(infos: list[worker_pb2.WorkerInfo]) -> None:
    """Raises PddError naming both workers and both values when two cannot exchange KV or tokens."""
    first = infos[0]
    for other in infos[1:]:
        for attribute, what in _MUST_AGREE:
            mine, theirs = getattr(first, attribute), getattr(other, attribute)
            if mine != theirs:
                raise PddError(
                    Code.INVALID_ARGUMENT,
                    f"workers do not fit together: {what} of {first.name} is {mine}, {what} of {other.name} is {theirs}",
                )


async def _first_info(place: WorkerPlace, site: str, timeout_s: float, survival: SurvivalConfig, tls: RpcTls | None) -> PooledWorker:
    """Raises PddError UNAVAILABLE; the channel is closed then."""
    control = place.route(site).control
    channel = open_channel(control.host, control.port, secured=to_worker(tls, place))
    stub = worker_pb2_grpc.WorkerStub(channel)
    deadline = time.monotonic() + timeout_s
    rtts_s: deque[float] = deque(maxlen=16)
    state = "no answer"
    try:
        while time.monotonic() < deadline:
            try:
                info = await _ask(stub, rtts_s, survival.answer_timeout_s)
            except grpc.aio.AioRpcError as error:
                state = f"{error.code().name}: {error.details()}"
            else:
                if info.ready:
                    limits = breaker_limits(survival.breaker)
                    return PooledWorker(place, channel, stub, info, ready=True, rtts_s=rtts_s, limits=limits)
                state = "not warmed up"
            await asyncio.sleep(0.1)
    except BaseException:
        await channel.close(grace=None)
        raise
    await channel.close(grace=None)
    raise PddError(Code.UNAVAILABLE, f"worker {place.name} is not ready after {timeout_s:g} s ({state})")


async def _ask(stub: worker_pb2_grpc.WorkerStub, rtts_s: deque[float], timeout_s: float) -> worker_pb2.WorkerInfo:
    asked = time.monotonic()
    info = await stub.Info(worker_pb2.InfoRequest(), timeout=timeout_s)
    rtts_s.append(time.monotonic() - asked)
    return info
