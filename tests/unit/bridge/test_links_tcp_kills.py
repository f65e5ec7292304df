"""Real processes, ended by SIGKILL at a random frame, sender or receiver: the other end goes on, nothing is wrong, nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from pddbridge.kv_spec import HeadRange, LayerRange
from tests.support.kill_children import LAYOUT, NUM_FRAMES, NUM_PAGES, NUM_TAKEN, PAGES_BYTES, PLANES, SPEC, TOKENS, Message, map_pages
from tests.support.kv import bits, canary_pool, fill_slowly, same_pools


class Process:
    """A child and what it says."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid = pid
        self._reader = reader
        self._writer = writer

    def tell(self, **command: object) -> None:
        self._writer.write(json.dumps(command).encode() + b"\n")

    async def hear(self, *keys: str) -> Message:
        """The next message, which has one of ``keys``."""
        async with asyncio.timeout(60):
            message = dict(json.loads(await self._reader.readline()))
        assert set(keys) & message.keys(), f"heard {message}, awaited {keys}"
        return message

    async def kill(self) -> None:
        """SIGKILL; returns when the process is dead: its end of the connection is closed."""
        os.kill(self.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            with contextlib.suppress(ConnectionResetError):
                while await self._reader.readline():
                    pass
        self._writer.close()


class Nursery:
    """Starts children."""

    def __init__(self, process: asyncio.subprocess.Process, arrived: dict[str, asyncio.Future[Process]]) -> None:
        self._process = process
        self._arrived = arrived
        self._pids: set[int] = set()

    async def start(self, name: str, *what: object) -> Process:
        connected = self._arrived[name] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, (name, *what))).encode() + b"\n")
        async with asyncio.timeout(60):
            pid = int(await self._process.stdout.readline())
            self._pids.add(pid)
            child = await connected
        child.pid = pid
        return child

    def alive(self) -> set[int]:
        return {pid for pid in self._pids if Path(f"/proc/{pid}/fd").exists()}


@asynccontextmanager
async def nursery() -> AsyncIterator[Nursery]:
    arrived: dict[str, asyncio.Future[Process]] = {}

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        arrived[hello["name"]].set_result(Process(0, reader, writer))

    # Short: a Unix socket's path is.
    with tempfile.TemporaryDirectory(prefix="pdd-") as folder:
        control = f"{folder}/control"
        server = await asyncio.start_unix_server(meet, control)
        command = (sys.executable, "-m", "tests.support.kill_children", control)
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
        family = Nursery(process, arrived)
        try:
            yield family
        finally:
            for pid in family.alive():
                os.kill(pid, signal.SIGKILL)
            process.kill()
            await process.wait()
            server.close()


class Pages:
    """A receiver's pages, in a file that outlives it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(PAGES_BYTES))
        self.pool, self.placed = map_pages(path)
        self.reset()

    def reset(self) -> None:
        """Canaries everywhere. Nobody may be writing."""
        for mine, canary in zip(self.pool.arrays, canary_pool(LAYOUT, SPEC, NUM_PAGES).arrays, strict=True):
            for array, values in zip(mine, canary, strict=True):
                array[...] = values
        self.placed[0] = 0

    async def until_placed(self, num_frames: int) -> None:
        async with asyncio.timeout(60):
            while self.placed[0] < num_frames:
                await asyncio.sleep(0.0005)

    def assert_exact(self, table: list[int]) -> None:
        expected = canary_pool(LAYOUT, SPEC, NUM_PAGES)
        fill_slowly(expected, np.array(table), PLANES, LayerRange(0, 4), TOKENS, HeadRange(0, 3))
        assert same_pools(self.pool, expected)

    def assert_others_untouched(self, table: list[int]) -> None:
        """Of a receiver that died while it wrote: every page but the transfer's."""
        others = [page for page in range(NUM_PAGES) if page not in table]
        for mine, canary in zip(self.pool.arrays, canary_pool(LAYOUT, SPEC, NUM_PAGES).arrays, strict=True):
            assert all(np.array_equal(bits(a)[others], bits(b)[others]) for a, b in zip(mine, canary, strict=True))


@pytest.mark.parametrize("num_kills", [10, pytest.param(200, marks=pytest.mark.slow)])
async def test_either_process_is_killed_at_a_random_frame(num_kills: int, tmp_path: Path) -> None:
    rng = random.Random(41)
    num_killed = {"sender": 0, "receiver": 0}
    async with nursery() as family:
        epoch, pages = 100, Pages(tmp_path / "pages-100")
        receiver = await family.start("receiver-100", "receive", 0, epoch, pages.path)
        at_start = await receiver.hear("port")
        port = at_start["port"]
        sender = await family.start("sender-1000", "send", 1000)
        sender_at_start = await sender.hear("sender")
        for transfer_id in range(1, num_kills + 1):
            pages.reset()
            receiver.tell(do="expect", transfer=transfer_id)
            table: list[int] = (await receiver.hear("expected"))["table"]  # type: ignore[assignment]
            sender.tell(do="push", transfer=transfer_id, port=port, epoch=epoch, resume=False)
            await pages.until_placed(rng.randrange(NUM_FRAMES))
            victim = rng.choice(["sender", "receiver"])
            num_killed[victim] += 1
            if victim == "sender":
                await sender.kill()
                name = 1000 + transfer_id
                sender = await family.start(f"sender-{name}", "send", name)
                sender_at_start = await sender.hear("sender")
                sender.tell(do="push", transfer=transfer_id, port=port, epoch=epoch, resume=True)
            else:
                await receiver.kill()
                pages.assert_others_untouched(table)
                epoch += 1
                pages = Pages(tmp_path / f"pages-{epoch}")
                receiver = await family.start(f"receiver-{epoch}", "receive", port, epoch, pages.path)
                at_start = await receiver.hear("port")
                # The sender finds out by itself; all may have been acknowledged just before.
                ended = await sender.hear("lost", "done")
                assert ended.get("code", "UNAVAILABLE") == "UNAVAILABLE"
                receiver.tell(do="expect", transfer=transfer_id)
                table = (await receiver.hear("expected"))["table"]  # type: ignore[assignment]
                sender.tell(do="push", transfer=transfer_id, port=port, epoch=epoch, resume=False)
            total = len(TOKENS) * SPEC.bytes_per_token
            assert (await sender.hear("done"))["bytes"] == total
            assert await receiver.hear("complete") == {"complete": transfer_id, "bytes": total}
            pages.assert_exact(table)
            receiver.tell(do="fence", transfer=transfer_id)
            fenced = await receiver.hear("fenced")
            assert (fenced["num_open"], fenced["num_free"], fenced["refused"]) == (0, NUM_PAGES, 0)
            assert len(table) == NUM_TAKEN
            assert family.alive() == {sender.pid, receiver.pid}
        assert min(num_killed.values()) >= num_kills // 4
        # Who is left holds what it held when it started.
        sender.tell(do="close")
        closed = await sender.hear("closed")
        assert closed["num_open"] == 0
        assert {key: closed[key] for key in ("num_tasks", "num_files")} == {key: sender_at_start[key] for key in ("num_tasks", "num_files")}
        async with asyncio.timeout(10):
            while True:
                receiver.tell(do="fence", transfer=0)
                left = await receiver.hear("fenced")
                if all(left[key] == at_start[key] for key in ("num_tasks", "num_files")):
                    break
                await asyncio.sleep(0.01)
