"""Concurrent generations, and responses that stop working when nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from pdd.serving.openai.sse import ClientGoneError, EventStream, while_connected
from pdd.serving.streams import interleave


class Source:
    """Yields ``items``, waiting for ``go`` before each when given; notes whether it was closed."""

    def __init__(self, *items: int | Exception, go: asyncio.Semaphore | None = None) -> None:
        self.items = items
        self.go = go
        self.closed = False
        self.tasks: set[object] = set()

    async def stream(self) -> AsyncGenerator[int, None]:
        try:
            for item in self.items:
                self.tasks.add(asyncio.current_task())
                if self.go is not None:
                    await self.go.acquire()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.tasks.add(asyncio.current_task())
            self.closed = True


async def test_items_keep_their_stream_and_order() -> None:
    sources = [Source(1, 2, 3), Source(), Source(10, 20)]
    found = [pair async for pair in interleave([source.stream() for source in sources])]
    assert [item for index, item in found if index == 0] == [1, 2, 3]
    assert [item for index, item in found if index == 2] == [10, 20]
    assert all(source.closed for source in sources)


async def test_no_streams_end_at_once() -> None:
    nothing: list[AsyncGenerator[int, None]] = []
    assert [pair async for pair in interleave(nothing)] == []


async def test_items_of_a_stream_arrive_while_another_waits() -> None:
    waiting, talking = Source(1, go=asyncio.Semaphore(0)), Source(5, 6)
    async with aclosing(interleave([waiting.stream(), talking.stream()])) as merged:
        async with asyncio.timeout(1):
            assert [await anext(merged), await anext(merged)] == [(1, 5), (1, 6)]
    assert waiting.closed


async def test_a_failure_comes_after_what_was_said_and_closes_the_others() -> None:
    failing, waiting = Source(1, ValueError("broke")), Source(2, go=asyncio.Semaphore(0))
    merged = interleave([failing.stream(), waiting.stream()])
    assert await anext(merged) == (0, 1)
    with pytest.raises(ValueError, match="broke"):
        await anext(merged)
    assert waiting.closed


async def test_closing_closes_all_in_the_tasks_that_drove_them() -> None:
    """A generation may hold what belongs to its task, such as asyncio.timeout."""
    sources = [Source(1, 2, go=asyncio.Semaphore(1)) for _ in range(3)]
    merged = interleave([source.stream() for source in sources])
    await anext(merged)
    await merged.aclose()
    assert all(source.closed for source in sources)
    assert all(len(source.tasks) == 1 for source in sources)
    assert asyncio.current_task() not in sources[0].tasks


async def test_cancelling_the_reader_closes_all() -> None:
    source = Source(1, go=asyncio.Semaphore(0))

    async def read() -> None:
        async with aclosing(interleave([source.stream()])) as merged:
            async for _ in merged:
                pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert source.closed


async def test_work_ends_before_the_caller_hears_that_the_client_left() -> None:
    left = asyncio.Event()
    cleaned = False

    async def receive() -> dict[str, object]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        nonlocal cleaned
        try:
            left.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned = True

    with pytest.raises(ClientGoneError):
        await while_connected(receive, work())
    assert cleaned


async def test_work_that_is_done_wins_over_a_client_that_leaves() -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    async def work() -> int:
        return 5

    assert await while_connected(receive, work()) == 5


async def _stay() -> dict[str, object]:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_connection_that_takes_nothing_is_given_up() -> None:
    closed = False

    async def events() -> AsyncGenerator[bytes, None]:
        nonlocal closed
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed = True

    sent: list[bytes] = []

    async def send(message: dict[str, object]) -> None:
        if len(sent) == 3:
            await asyncio.Event().wait()
        sent.append(message.get("body", b""))

    rest = events()
    await anext(rest)
    stalled: list[str] = []
    async with asyncio.timeout(2):
        await EventStream(b"data: first\n\n", rest, 0.05, b"", lambda: stalled.append("http"))({}, _stay, send)
    assert closed
    assert stalled == ["http"]
    assert sent == [b"", b"data: first\n\n", b"data: x\n\n"]
