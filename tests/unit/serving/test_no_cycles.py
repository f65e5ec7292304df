"""What a request leaves behind is freed when it ends, not when the interpreter looks for cycles: in between, memory would grow with every
request, and looking for them holds up the loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from pdd.errors import PddError
from pdd.serving.coordinator import Coordinator
from pdd.serving.request import GenerationRequest
from pdd.serving.streams import interleave
from tests.support.cycles import cycles_of
from tests.support.generation import hashed_token, make_request
from tests.support.scripted_workers import THREE_WORKERS, serving
from tests.support.worker_script import Script

NUM_REQUESTS = 4


async def read(coordinator: Coordinator, requests: list[GenerationRequest], num_deltas: int | None = None) -> None:
    """Side by side, as a door does; a reader goes away after ``num_deltas``."""
    async with aclosing(interleave([coordinator.generate(request) for request in requests])) as deltas:
        seen = 0
        async for _ in deltas:
            seen += 1
            if seen == num_deltas:
                return


@pytest.mark.parametrize("override", [{}, {"pipeline": "direct"}, {"pipeline": "relay"}, {"handoff_at": 2}], ids=str)
@pytest.mark.parametrize("num_deltas", [None, 3], ids=["read", "left"])
async def test_a_request_that_ends_is_gone(override: dict[str, object], num_deltas: int | None) -> None:
    async with serving(hashed_token, roles=THREE_WORKERS, kv_bytes_per_token=1000) as (_, coordinator):
        await read(coordinator, [make_request("first", **override)])
        with cycles_of("pdd.") as found:
            for i in range(NUM_REQUESTS):
                prompt = tuple(range(40 + i, 60 + 2 * i))
                same = [make_request(f"{i}.{k}", prompt, **override) for k in range(1 + i % 2)]
                await read(coordinator, same, num_deltas)
            await asyncio.sleep(0.1)  # workers are told that it is over
    assert not requests_in(found)


async def test_a_request_that_fails_is_gone() -> None:
    scripts = {name: Script(refuse=("INTERNAL", "on purpose")) for name in ("prefill-0", "relay-0", "main-0")}
    async with serving(hashed_token, scripts=scripts, roles=THREE_WORKERS) as (_, coordinator):
        with cycles_of("pdd.") as found:
            for i in range(NUM_REQUESTS):
                with pytest.raises(PddError):
                    await read(coordinator, [make_request(f"{i}")])
            await asyncio.sleep(0.1)
    assert not requests_in(found)


@pytest.mark.parametrize(
    "scripts",
    [{"main-0": Script(break_at=6)}, {"relay-0": Script(break_at=2)}, {"prefill-0": Script(fail_prefill=("INTERNAL", "on purpose"))}],
    ids=["main", "relay", "prefill"],
)
async def test_a_request_that_loses_a_worker_is_gone(scripts: dict[str, Script]) -> None:
    async with serving(hashed_token, scripts=scripts, roles=THREE_WORKERS) as (_, coordinator):
        with cycles_of("pdd.") as found:
            await read(coordinator, [make_request("first", pipeline="relay", handoff_at=4)])
            await asyncio.sleep(0.1)
    assert not requests_in(found)


async def test_streams_that_a_reader_leaves_are_gone() -> None:
    async def numbers() -> AsyncGenerator[_Item, None]:
        while True:
            yield _Item()
            await asyncio.sleep(0)

    with cycles_of(__name__) as found:
        async with aclosing(interleave([numbers(), numbers()])) as items:
            async for _ in items:
                break
        reader = asyncio.create_task(forever(interleave([numbers(), numbers()])))
        await asyncio.sleep(0.01)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        del reader
    assert not found


async def test_streams_of_which_one_fails_are_gone() -> None:
    async def failing() -> AsyncGenerator[_Item, None]:
        yield _Item()
        raise ValueError("on purpose")

    async def fail() -> None:
        with pytest.raises(ValueError, match="on purpose"):
            await forever(interleave([failing(), failing()]))

    with cycles_of(__name__) as found:
        await fail()
    assert not found


class _Item:
    pass


async def forever(stream: AsyncGenerator[tuple[int, _Item], None]) -> None:
    async with aclosing(stream) as items:
        async for _ in items:
            pass


def requests_in(found: Counter[str]) -> dict[str, int]:
    """Of the coordinator: workers here are of tests, and what their gRPC servers leave behind is not ours to mend."""
    return {name: count for name, count in found.items() if name.startswith(("pdd.serving", "pdd.policy"))}
