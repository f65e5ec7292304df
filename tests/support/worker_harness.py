"""A worker in this process, over real gRPC and the real KV link on loopback, with any engine; and a coordinator's side of Attach."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from types import TracebackType

import grpc.aio
import pytest

from pdd.worker.executor import ExecutorLimits
from pdd.worker.kv_codecs import CodecChoice
from pdd.worker.open_command import Receivers
from pdd.worker.service import Runtime, WorkerService
from pdd.worker.step_loop import StepLoop
from pdd.worker.transfers import KVTraffic
from pddbridge.engine import Engine, Step
from pddbridge.fingerprint import fingerprint
from pddbridge.links.nixl import NixlAgent
from pddbridge.links.tcp import PROTOCOL_VERSION, Handshake
from pddbridge.rpc.channel import bind, make_server, open_channel
from pddbridge.rpc.convert import params_to_proto
from pddbridge.rpc.gen import worker_pb2, worker_pb2_grpc
from pddbridge.sampling_params import SamplingParams
from tests.support.ledger import IDLE_WITHIN_S, assert_idle

EVENT_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 60.0


class WorkerHarness:
    """``async with``: started on entry; on exit the ledger must be idle."""

    def __init__(
        self,
        name: str,
        make_engine: Callable[[], Engine],
        *,
        limits: ExecutorLimits | None = None,
        use_prefix_cache: bool = True,
        check_idle_within_s: float = IDLE_WITHIN_S,
        with_nixl: bool = False,
        codecs: CodecChoice | None = None,
        peers: Collection[str] | None = None,
        receivers: Receivers = None,
        kv_port: int = 0,
    ) -> None:
        self._kv_port = kv_port
        self._peers = peers
        self._receivers = receivers
        self.name = name
        self.crashes: list[BaseException] = []
        self._make_engine = make_engine
        self._limits = limits
        self._use_prefix_cache = use_prefix_cache
        self._check_idle_within_s = check_idle_within_s
        self._with_nixl = with_nixl
        self._codecs = codecs
        self._nixl: NixlAgent | None = None

    async def __aenter__(self) -> WorkerHarness:
        self.service = WorkerService(self.name, secrets.randbelow(2**64 - 1) + 1)
        loop = asyncio.get_running_loop()
        self.step_loop = StepLoop(
            self._make_engine, loop, self.service.deliver, self.crashes.append, None, self._use_prefix_cache, self._limits
        )
        self.step_loop.start()
        facts = await asyncio.wrap_future(self.step_loop.ready)
        semantic = fingerprint(facts.spec, facts.weights_digest, facts.kv_spec)
        if self._with_nixl:
            self._nixl = NixlAgent(f"{self.name}-{self.service.epoch:x}")
            await self._nixl.start()
        handshake = Handshake(PROTOCOL_VERSION, semantic, facts.kv_spec, self.service.epoch, self.name)
        self.traffic = KVTraffic(handshake, self.step_loop, self._nixl, self._codecs, self._peers)
        self.kv_port = await self.traffic.start("127.0.0.1", self._kv_port)
        self.server = make_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, self.server)
        self.port = bind(self.server, "127.0.0.1", 0)
        await self.server.start()
        self.runtime = Runtime(facts, "tiny", semantic, self.step_loop, self.traffic, self._receivers)
        self.service.begin(self.runtime)
        self.channel = open_channel("127.0.0.1", self.port)
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)
        # A call on a channel whose first attempt to connect timed out fails: on a machine that is busy enough one does.
        await asyncio.wait_for(self.channel.channel_ready(), CONNECT_TIMEOUT_S)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                await self.assert_idle()
                assert not self.crashes
        finally:
            await self.service.end()
            await self.channel.close(grace=None)
            await self.server.stop(grace=None)
            await self.traffic.close()
            if self._nixl is not None:
                await self._nixl.close()
            self.step_loop.stop()
            assert await asyncio.to_thread(self.step_loop.join, 10.0)

    async def ledger(self) -> worker_pb2.LedgerReply:
        reply: worker_pb2.LedgerReply = await self.stub.Ledger(worker_pb2.LedgerRequest())
        return reply

    async def assert_idle(self) -> worker_pb2.LedgerReply:
        return await assert_idle(self.ledger, self._check_idle_within_s)

    def attach(self) -> Attached:
        return Attached(self)

    def target(self, reserved: worker_pb2.Reserved) -> worker_pb2.PushTarget:
        """What a prefill worker is told, after this worker's ``reserved``."""
        return worker_pb2.PushTarget(
            target=self.name,
            host="127.0.0.1",
            port=self.kv_port,
            epoch=reserved.epoch,
            transfer_id=reserved.transfer_id,
            first_token=reserved.hit_tokens,
        )


class Attached:
    """One Attach stream from the coordinator's side."""

    def __init__(self, worker: WorkerHarness) -> None:
        self.worker = worker
        self.seen: list[worker_pb2.WorkerEvent] = []
        self._commands: asyncio.Queue[worker_pb2.WorkerCommand | None] = asyncio.Queue()
        self.call = worker.stub.Attach(self._requests())

    def open(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        transfer: bool = False,
        decode: bool = True,
        max_tokens: int = 8,
        log: Sequence[int] = (),
        push_to: Sequence[worker_pb2.PushTarget] = (),
        timeout_s: float = 30.0,
        limit: int | None = None,
        tenant: str = "",
        params: SamplingParams | None = None,
    ) -> Attached:
        source = worker_pb2.KV_SOURCE_TRANSFER if transfer else worker_pb2.KV_SOURCE_COMPUTE
        message = worker_pb2.Open(
            request_id=request_id,
            tenant=tenant,
            prompt_ids=prompt,
            sampling=params_to_proto(params or SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0)),
            kv_source=source,
            push_to=push_to,
            decode=decode,
            log_ids=log,
            timeout_s=timeout_s,
            max_propose_tokens=limit,
        )
        self.send(worker_pb2.WorkerCommand(open=message))
        return self

    def ingest(self, position: int, ids: Sequence[int], decode: bool) -> None:
        self.send(worker_pb2.WorkerCommand(ingest=worker_pb2.Ingest(position=position, token_ids=ids, decode=decode)))

    def seal(self) -> None:
        self.send(worker_pb2.WorkerCommand(seal=worker_pb2.Seal()))

    def send(self, command: worker_pb2.WorkerCommand) -> None:
        self._commands.put_nowait(command)

    async def next(self) -> worker_pb2.WorkerEvent:
        """The next event. Raises AioRpcError when the stream ended with a status, EOFError when it ended in order."""
        event = await asyncio.wait_for(self.call.read(), EVENT_TIMEOUT_S)
        if event is grpc.aio.EOF:
            code, details = await self.call.code(), await self.call.details()
            if code is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
            raise EOFError
        self.seen.append(event)
        return event

    async def until(self, kind: str) -> worker_pb2.WorkerEvent:
        """Read on until an event of ``kind``, which is returned; a Failed on the way raises."""
        while True:
            event = await self.next()
            name = event.WhichOneof("event")
            if name == kind:
                return event
            assert name != "failed", event

    async def until_failed(self) -> worker_pb2.WorkerEvent:
        """Read on until a Failed event, of the request or of a push."""
        while True:
            event = await self.next()
            if event.WhichOneof("event") == "failed":
                return event

    async def tokens(self, count: int) -> list[int]:
        """Read on until ``count`` tokens have come on this stream; their ids, in position order."""
        while len(self.ids()) < count:
            await self.next()
        return self.ids()

    def ids(self) -> list[int]:
        return [record.token_id for event in self.seen if event.WhichOneof("event") == "tokens" for record in event.tokens.records]

    def kinds(self) -> list[str | None]:
        return [event.WhichOneof("event") for event in self.seen]

    async def half_close(self) -> None:
        """End this side in order; returns when the worker has ended its own."""
        self._commands.put_nowait(None)
        while await asyncio.wait_for(self.call.read(), EVENT_TIMEOUT_S) is not grpc.aio.EOF:
            pass  # the status comes only behind the last message

    def cancel(self) -> None:
        self._commands.put_nowait(None)
        self.call.cancel()

    async def _requests(self) -> AsyncIterator[worker_pb2.WorkerCommand]:
        while (command := await self._commands.get()) is not None:
            yield command


class Gate:
    """Holds the step thread before a step until it is opened; ``reached`` tells that it stands there."""

    def __init__(self, opened: bool = False) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        if opened:
            self._open.set()

    def __call__(self, step: Step) -> None:
        self.reached.set()
        assert self._open.wait(10), "the gate was never opened"

    def close(self) -> None:
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 10)


async def status_of(stream: Attached) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.next()
    code: grpc.StatusCode = caught.value.code()
    return code
