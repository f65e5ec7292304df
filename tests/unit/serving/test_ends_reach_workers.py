"""However a request ends, each worker lets go of it: cases 23, 26 and 36, with real workers' services, KV links and coordinator.

The engine is the in-test one, whose tokens tell whether KV is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from pdd.errors import Code, PddError
from pdd.roles import Role
from pdd.serving.request import GenerationRequest
from pdd.worker.service import AttachContext, WorkerService
from pddbridge.engine import Step
from pddbridge.rpc.gen import worker_pb2
from tests.support.fake_engine import FakeEngine, expected_log
from tests.support.generation import collect, make_request, params
from tests.support.ledger import assert_idle
from tests.support.small_system import SmallSystem, small_system

PROMPT_LEN, MAX_CONTEXT = 40, 64
MOST_PER_REQUEST_S = 0.2  # ten times what it takes
STEP_S = 0.1  # two steps are much longer than a cancellation takes to arrive


def request_of(number: int, length: int, max_tokens: int) -> GenerationRequest:
    prompt = [(7 * number + 13 * at + number * at) % 290 + 5 for at in range(length)]
    return make_request(f"r{number}", prompt, params(max_tokens, eos_token_ids=frozenset()), timeout_s=60.0)


def answer_to(request: GenerationRequest) -> list[int]:
    return expected_log(request.prompt_ids, request.sampling.max_tokens)


@contextlib.asynccontextmanager
async def silent_port() -> AsyncIterator[int]:
    """Takes connections and reads; says nothing."""

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
        writer.close()

    async with await asyncio.start_server(swallow, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


WRONG: dict[str, worker_pb2.WorkerCommand] = {
    "an id outside the vocabulary": worker_pb2.WorkerCommand(ingest=worker_pb2.Ingest(position=0, token_ids=[5, 300], decode=True)),
    "a gap in the log": worker_pb2.WorkerCommand(ingest=worker_pb2.Ingest(position=3, token_ids=[5], decode=True)),
    "more than its context": worker_pb2.WorkerCommand(ingest=worker_pb2.Ingest(position=0, token_ids=[5] * MAX_CONTEXT, decode=True)),
    "an unknown class": worker_pb2.WorkerCommand(set_priority=worker_pb2.SetPriority(target="x", priority=99)),  # type: ignore[arg-type]
    "a second open": worker_pb2.WorkerCommand(open=worker_pb2.Open(request_id="r")),
}


@pytest.mark.parametrize("name", WRONG)
async def test_case_23_what_main_refuses_after_prefill_has_prefilled_frees_prefill(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill is done and main's KV port says nothing, so prefill holds the prompt's KV for main. Then main refuses."""
    refuse = asyncio.Event()
    attach = WorkerService.Attach

    async def with_a_wrong_command(self: WorkerService, commands: AsyncIterator[worker_pb2.WorkerCommand], context: AttachContext) -> None:
        async def and_then() -> AsyncIterator[worker_pb2.WorkerCommand]:
            rest = aiter(commands)
            yield await anext(rest)
            await refuse.wait()
            yield WRONG[name]
            async for command in rest:
                yield command

        await attach(self, and_then() if self._name == "main-0" else commands, context)

    monkeypatch.setattr(WorkerService, "Attach", with_a_wrong_command)
    engines: dict[Role, FakeEngine] = {role: FakeEngine(max_context=MAX_CONTEXT) for role in ("prefill", "main")}
    async with silent_port() as port, small_system(engines, "direct", kv_ports={"main": port}) as system:
        running = asyncio.create_task(collect(system.coordinator, request_of(0, PROMPT_LEN, 8)))
        prefill = system.workers["prefill"]
        async with asyncio.timeout(5):
            while (await prefill.ledger()).computed_prompt_tokens < PROMPT_LEN - 1:
                await asyncio.sleep(0.005)
        held = await prefill.ledger()
        assert held.pinned_pages > 0
        assert held.num_outgoing_transfers == 1
        refuse.set()
        with pytest.raises(PddError, match="main-0") as caught:
            await running
        assert caught.value.code is Code.INVALID_ARGUMENT
        for worker in system.workers.values():
            await assert_idle(worker.ledger, within_s=1.0)


def step_slowly(step: Step) -> None:
    threading.Event().wait(STEP_S)


@pytest.mark.parametrize("decodes", ["relay", "main"])
async def test_case_36_a_client_that_leaves_stops_whoever_decodes_within_two_steps(decodes: Role) -> None:
    """Two tokens of five hundred are read. Main's KV never comes where the relay decodes."""
    room = {"num_pages": 80, "max_context": 600}
    engines = {role: FakeEngine(**room, before_step=step_slowly if role == decodes else None) for role in ("prefill", "relay", "main")}
    async with silent_port() as port:
        pipeline, kv_ports = ("relay", {"main": port}) if decodes == "relay" else ("direct", {})
        async with small_system(engines, pipeline, kv_ports=kv_ports) as system:
            deltas = system.coordinator.generate(request_of(0, PROMPT_LEN, 500))
            for _ in range(2):
                assert (await anext(deltas)).origin == decodes
            before = len(engines[decodes].steps)
            await deltas.aclose()
            for worker in system.workers.values():
                await worker.assert_idle()
            stopped = len(engines[decodes].steps)
            assert stopped - before <= 2
            await asyncio.sleep(2 * STEP_S)
            assert len(engines[decodes].steps) == stopped


async def leave_at_a_random_time(system: SmallSystem, request: GenerationRequest, rng: random.Random) -> str:
    """Cancel after a time, close after some tokens, or read to the end. What became of it. Raises PddError."""
    how = rng.choice(["cancel", "cancel", "close", "read"])
    seen: list[int] = []

    async def read(most: int) -> None:
        deltas = system.coordinator.generate(request)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                seen.extend(record.token_id for record in delta.records)
                if len(seen) >= most:
                    return

    wanted = rng.randrange(1, 8) if how == "close" else request.sampling.max_tokens
    reading = asyncio.create_task(read(wanted))
    if how == "cancel":
        await asyncio.wait({reading}, timeout=rng.uniform(0.0, 0.06))
        reading.cancel()
    await asyncio.wait({reading})
    if reading.cancelled():
        how = "cancelled"
    else:
        reading.result()
    assert seen == answer_to(request)[: len(seen)]
    assert how != "read" or seen == answer_to(request)
    return how


@pytest.mark.parametrize("num_requests", [150, pytest.param(1000, marks=pytest.mark.slow)])
async def test_case_26_aborts_at_random_times_leave_no_page_behind(num_requests: int) -> None:
    """Pools of two or three requests. Nobody is refused; whoever is not aborted is served, to the last; and in the end a request as large
    as a pool fits.
    """
    rng = random.Random(26)
    engines: dict[Role, FakeEngine] = {
        "prefill": FakeEngine(num_pages=20, max_context=MAX_CONTEXT),
        "relay": FakeEngine(num_pages=16, max_context=MAX_CONTEXT),
        "main": FakeEngine(page_size=12, num_pages=11, max_context=MAX_CONTEXT),
    }
    async with small_system(engines, "relay", {"max_wait_s": 60.0}) as system:
        outcomes: list[str] = []

        async def client(numbers: range) -> None:
            for number in numbers:
                request = request_of(number, rng.randrange(1, PROMPT_LEN), 16)
                outcomes.append(await leave_at_a_random_time(system, request, rng))

        async with asyncio.timeout(num_requests * MOST_PER_REQUEST_S), asyncio.TaskGroup() as clients:
            for first in range(6):
                clients.create_task(client(range(first, num_requests, 6)))
        assert len(outcomes) == num_requests
        assert outcomes.count("cancelled") > num_requests // 10
        for worker in system.workers.values():
            ledger = await worker.assert_idle()
            assert ledger.free_pages + ledger.cached_pages == ledger.total_pages
        largest = replace(request_of(num_requests, MAX_CONTEXT - 8, 8), request_id="largest")
        assert (await collect(system.coordinator, largest)).ids == answer_to(largest)
