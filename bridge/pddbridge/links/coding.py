"""Threads that code and decode payloads, some milliseconds per frame, so that the event loop does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pddbridge.give_way import give_way

T = TypeVar("T")


class CodingThreads:
    """At most ``max_threads``, started when they are first needed. The loop runs on meanwhile: zstd and numpy let go of the interpreter.

    Work that was begun is not stopped by cancelling who awaits it; it holds on to the memory that it reads and writes.
    """

    def __init__(self, max_threads: int = 2) -> None:
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="kv-coding", initializer=give_way)

    async def run(self, work: Callable[[], T]) -> T:
        """``work()``, by one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Does not wait for work that was begun; what was not is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
