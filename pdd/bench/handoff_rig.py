"""What the handoff microbenchmark drives: three real workers, two ways to hand relayed tokens to main decode, other traffic, neighbours.

One side of everything is this process, in the coordinator's place at the relay's site: it reaches main decode over the emulated link.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypeVar

import numpy as np

from pdd.launch.ask import AskError
from pdd.serving.worker_events import Event, Failed, Ingested, KvComplete, Prefilled, Proposed, Pushed, PushFailed, Reserved
from pdd.serving.worker_stream import WorkerStream
from pdd.topology import Address, Topology
from pddbridge.rpc.channel import open_channel
from pddbridge.rpc.convert import params_to_proto
from pddbridge.rpc.gen import worker_pb2, worker_pb2_grpc
from pddbridge.sampling_params import SamplingParams

Route = Literal["ids", "kv"]
E = TypeVar("E", Reserved, Prefilled, KvComplete, Pushed, Proposed, Ingested)

_TIMEOUT_S = 120.0
_TENANT = "handoff"
# A multiple of every usual page size: what main has of the prompt is then whole pages, and a hit is exactly this long.
BASE_TOKENS = 256
_NEIGHBOUR_PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Handoff:
    """One handoff. ``seconds`` from the decision to main's first own token, as the coordinator sees it; ``payload_bytes``: of the Ingest
    message, or of the KV frames' payloads.
    """

    seconds: float
    payload_bytes: int
    started_s: float
    ended_s: float


class _Request:
    """One request on one worker. Use as a context manager; leaving it returns its pages."""

    def __init__(self, worker: _Worker, opening: worker_pb2.Open) -> None:
        self.stream = WorkerStream(worker.stub, worker.vocab_size, _TIMEOUT_S)
        self._name = worker.name
        self._events = self.stream.events()
        self.stream.open(opening)

    async def __aenter__(self) -> _Request:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stream.close()
        async for _ in self._events:
            pass

    async def until(self, wanted: type[E]) -> E:
        """The next event of this type; others are passed over. Raises AskError when the worker fails."""
        async for event in self._events:
            if isinstance(event, wanted):
                return event
            self._check(event)
        raise AskError(f"{self._name}: the stream ended before {wanted.__name__}")

    def _check(self, event: Event) -> None:
        if isinstance(event, Failed | PushFailed):
            raise AskError(f"{self._name}: {event.message}")


class _Worker:
    """A worker as reached at ``address``."""

    def __init__(self, name: str, address: Address) -> None:
        self.name = name
        self.vocab_size = 0
        self._channel = open_channel(address.host, address.port)
        self._numbers = itertools.count()
        self.stub = worker_pb2_grpc.WorkerStub(self._channel)

    async def meet(self) -> worker_pb2.WorkerInfo:
        info = await self.stub.Info(worker_pb2.InfoRequest(), timeout=_TIMEOUT_S)
        self.vocab_size = info.vocab_size
        return info

    async def close(self) -> None:
        await self._channel.close(grace=None)

    def request(
        self,
        prompt: Sequence[int],
        *,
        transfer: bool = False,
        decode: bool = False,
        max_new: int = 1,
        tenant: str = _TENANT,
        push_to: worker_pb2.PushTarget | None = None,
    ) -> _Request:
        params = SamplingParams(seed=1, max_tokens=max_new, temperature=0.0, ignore_eos=True)
        opening = worker_pb2.Open(
            request_id=f"bench-{self.name}-{id(self)}-{next(self._numbers)}",
            tenant=tenant,
            prompt_ids=prompt,
            sampling=params_to_proto(params),
            kv_source=worker_pb2.KV_SOURCE_TRANSFER if transfer else worker_pb2.KV_SOURCE_COMPUTE,
            push_to=[] if push_to is None else [push_to],
            decode=decode,
            timeout_s=_TIMEOUT_S,
            max_propose_tokens=max_new,
        )
        return _Request(self, opening)

    async def prefill(self, prompt: Sequence[int], tenant: str = _TENANT) -> None:
        """Have the KV of ``prompt[:-1]`` in the prefix cache."""
        async with self.request(prompt, tenant=tenant) as request:
            await request.until(Prefilled)


class Rig:
    """``relay`` holds the generated KV, ``other`` sends the background transfers, ``main`` receives both. Use as a context manager."""

    def __init__(self, topology: Topology, relay: str, other: str, main: str, seed: int) -> None:
        here = topology.worker(relay).site
        route = topology.worker(main).route(here)
        self._kv_address = route.kv
        self._relay = _Worker(relay, topology.worker(relay).control)
        self._other = _Worker(other, topology.worker(other).control)
        self._main = _Worker(main, route.control)
        # Neighbours' gaps are the worker's, not the link's, so they are watched from beside it.
        self._beside_main = _Worker(main, topology.worker(main).control)
        self._rng = np.random.default_rng(seed)
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Rig:
        for worker in (self._relay, self._other, self._main, self._beside_main):
            self._max_context = (await worker.meet()).max_context_tokens
        self._base = self._fresh(BASE_TOKENS)
        vocab_size = self._main.vocab_size
        # What follows the base must differ from all that did before, or more than the base would be in a cache.
        self._unseen = itertools.cycle(self._rng.permutation(np.arange(vocab_size // 2, vocab_size)).tolist())
        for worker in (self._relay, self._main):
            await worker.prefill([*self._base, next(self._unseen)])
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in (self._relay, self._other, self._main, self._beside_main):
            await worker.close()

    async def hand_over(self, route: Route, num_tokens: int) -> Handoff:
        """Fresh relayed tokens after the common prompt, so that neither side has seen them; what precedes the handoff is not timed."""
        return await (self._by_ids(num_tokens) if route == "ids" else self._by_kv(num_tokens))

    async def _by_ids(self, num_tokens: int) -> Handoff:
        prompt, relayed = [*self._base, next(self._unseen)], self._fresh(num_tokens)
        async with self._main.request(prompt, transfer=True, max_new=num_tokens + 1) as request:
            await self._expect_hit(request)
            await request.until(KvComplete)
            started_s = self._loop.time()
            request.stream.ingest(0, relayed, decode=True)
            await request.until(Proposed)
            ended_s = self._loop.time()
        ingest = worker_pb2.Ingest(position=0, token_ids=relayed, decode=True)
        return Handoff(ended_s - started_s, worker_pb2.WorkerCommand(ingest=ingest).ByteSize(), started_s, ended_s)

    async def _by_kv(self, num_tokens: int) -> Handoff:
        # The same tokens are known to main as with IDs: the prompt's last token and the relayed ones. The last is main's next input.
        known = [*self._base, next(self._unseen), *self._fresh(num_tokens)]
        await self._relay.prefill(known)
        async with self._main.request(known, transfer=True, decode=True) as request:
            reserved = await self._expect_hit(request)
            target = self._target(reserved)
            started_s = self._loop.time()
            async with self._relay.request(known, push_to=target) as push:
                await request.until(Proposed)
                ended_s = self._loop.time()
                pushed = await push.until(Pushed)
        return Handoff(ended_s - started_s, pushed.num_bytes, started_s, ended_s)

    @asynccontextmanager
    async def background(self, mean_tokens: int, mean_pause_s: float, seed: int) -> AsyncIterator[None]:
        """Other requests' KV crosses the same link meanwhile, into pages of main decode, with sizes and pauses distributed exponentially:
        from the other worker, which takes a share of the line, and from the relay itself, where transfers take turns.
        """
        prompt = self._fresh(min(4 * mean_tokens, self._max_context - 2))
        senders = (self._other, self._relay)
        for sender in senders:
            await sender.prefill(prompt, "background")
        streams = [
            asyncio.create_task(self._transfers(sender, prompt, mean_tokens, mean_pause_s, 2 * seed + i))
            for i, sender in enumerate(senders)
        ]
        try:
            yield
        finally:
            for stream in streams:
                stream.cancel()
            for ended in await asyncio.gather(*streams, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended

    @asynccontextmanager
    async def neighbours(self, count: int) -> AsyncIterator[list[list[float]]]:
        """Requests that decode on main meanwhile; yields the arrival times of each one's tokens, which grow."""
        times: list[list[float]] = [[] for _ in range(count)]
        watchers = [asyncio.create_task(self._watch(arrivals)) for arrivals in times]
        try:
            while any(len(arrivals) < 3 for arrivals in times) and not any(watcher.done() for watcher in watchers):
                await asyncio.sleep(0.01)
            yield times
        finally:
            for watcher in watchers:
                watcher.cancel()
            for ended in await asyncio.gather(*watchers, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended

    async def _watch(self, arrivals: list[float]) -> None:
        prompt = self._fresh(_NEIGHBOUR_PROMPT_TOKENS)
        max_new = self._max_context - len(prompt)
        async with self._beside_main.request(prompt, decode=True, max_new=max_new, tenant="neighbour") as request:
            while True:
                await request.until(Proposed)
                arrivals.append(self._loop.time())

    async def _transfers(self, sender: _Worker, prompt: list[int], mean_tokens: int, mean_pause_s: float, seed: int) -> None:
        rng = random.Random(seed)
        for number in itertools.count():
            await asyncio.sleep(rng.expovariate(1 / mean_pause_s))
            size = max(2, min(int(rng.expovariate(1 / mean_tokens)), len(prompt) - 1))
            # A tenant of its own: main has none of it.
            async with self._main.request(prompt[: size + 1], transfer=True, tenant=f"background-{seed}-{number}") as request:
                target = self._target(await request.until(Reserved))
                async with sender.request(prompt[: size + 1], tenant="background", push_to=target) as push:
                    await request.until(KvComplete)
                    await push.until(Pushed)

    async def _expect_hit(self, request: _Request) -> Reserved:
        reserved = await request.until(Reserved)
        if reserved.hit_tokens != BASE_TOKENS:
            raise AskError(f"main decode has {reserved.hit_tokens} tokens of the prompt in its cache, {BASE_TOKENS} were put there")
        return reserved

    def _target(self, reserved: Reserved) -> worker_pb2.PushTarget:
        address = self._kv_address
        return worker_pb2.PushTarget(
            target=self._main.name,
            host=address.host,
            port=address.port,
            epoch=reserved.epoch,
            transfer_id=reserved.transfer_id,
            first_token=reserved.hit_tokens,
        )

    def _fresh(self, count: int) -> list[int]:
        """Random ids of the upper half of the vocabulary: no special tokens there in any vocabulary we know."""
        vocab_size = self._main.vocab_size
        return self._rng.integers(vocab_size // 2, vocab_size, size=count).tolist()
