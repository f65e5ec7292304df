"""Running several generations side by side, so that all of them end when one fails or the reader goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def interleave(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(stream index, item) in order of arrival. Raises what the first failing stream raises, after all others are closed.

    Each stream is driven and closed by one task of its own. Closing this generator closes all of them before it returns. Items wait in
    memory when the reader is slow (a generation is bounded by the context), so a slow reader holds no worker's pages.
    """
    arrived: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()
    tasks = [_start(index, stream, arrived) for index, stream in enumerate(streams)]
    item: tuple[int, T] | asyncio.Task[None] | None = None
    try:
        num_running = len(tasks)
        while num_running:
            item = await arrived.get()
            if isinstance(item, asyncio.Task):
                num_running -= 1
                item.result()
            else:
                yield item
    finally:
        await _end(tasks)
        # The error of a task refers to this frame. As long as the frame refers to the task, both wait for a garbage collection, and the
        # requests with them.
        item = None
        tasks.clear()
        while not arrived.empty():
            arrived.get_nowait()


def _start(index: int, stream: AsyncGenerator[T, None], arrived: asyncio.Queue[tuple[int, T] | asyncio.Task[None]]) -> asyncio.Task[None]:
    task = asyncio.create_task(_drive(index, stream, arrived))
    task.add_done_callback(arrived.put_nowait)
    return task


async def _drive(index: int, stream: AsyncGenerator[T, None], arrived: asyncio.Queue[tuple[int, T] | asyncio.Task[None]]) -> None:
    async with aclosing(stream):
        async for item in stream:
            arrived.put_nowait((index, item))


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
