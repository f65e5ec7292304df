"""Senders and receivers as processes of their own, to be killed: a nursery that has imported everything forks them in milliseconds.

``python -m tests.support.kill_children CONTROL`` reads a line per child, ``NAME ROLE ...``, and answers with its pid. A child connects to
the Unix socket CONTROL, says its name and takes commands, JSON lines both ways:

receive PORT EPOCH PAGES: pages are the file PAGES, shared, so that they can be looked at when the process is dead; its first 8 bytes count
the frames that were placed. ``expect`` takes pages for a transfer from the ledger, ``fence`` returns them.
send EPOCH: ``push`` sends the whole of TOKENS, ``close`` ends every connection.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool, write_block
from pddbridge.kv_layout import head_major
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.links.tcp import Handshake, KVSender, KVServer, SenderSettings, TransferFailed, TransferReport
from tests.support.kv import blocks_of, random_planes

SPEC = KVSpec.gqa(4, 3, 8, "bfloat16")
TOKENS = TokenRange(5, 100)
CHUNK = 8
NUM_FRAMES = 2 * -(-len(TOKENS) // CHUNK)  # two planes
PLANES = random_planes(SPEC, TOKENS.stop, seed=3)
NUM_PAGES = 14
NUM_TAKEN = 9
LAYOUT = head_major(12, SPEC.dtype)
_COUNT_BYTES = 8
_ARRAY_SHAPE = (NUM_PAGES, 3, 12, 8)
PAGES_BYTES = _COUNT_BYTES + SPEC.num_layers * 2 * int(np.prod(_ARRAY_SHAPE)) * 2
SENDER = Handshake(1, "f1", SPEC, 11, "prefill-1")
RECEIVER = replace(SENDER, epoch=22, name="main-1")
SETTINGS = SenderSettings(num_connections=2, stall_timeout_s=20.0, backoff_s=0.01)

Message = dict[str, object]


def map_pages(path: Path) -> tuple[KVPool, np.ndarray]:
    """The pool in ``path`` and how many frames were placed there, [1] int64; both shared with whoever maps it."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), PAGES_BYTES)
    values = np.frombuffer(memory, SPEC.np_dtype, offset=_COUNT_BYTES).reshape(SPEC.num_layers, 2, *_ARRAY_SHAPE)
    return KVPool(LAYOUT, SPEC, tuple((layer[0], layer[1]) for layer in values)), np.frombuffer(memory, np.int64, 1)


class Child:
    """What both roles share: the control connection and what the process holds."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def say(self, **message: object) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def held(self) -> Message:
        return {"num_tasks": len(asyncio.all_tasks()), "num_files": len(os.listdir("/proc/self/fd"))}

    async def command(self) -> Message:
        line = await self._reader.readline()
        if not line:
            os._exit(0)  # nobody is left to kill it
        return dict(json.loads(line))


async def receive(child: Child, port: int, epoch: int, pages: Path) -> None:
    pool, placed = map_pages(pages)
    rng = random.Random(epoch)
    free, tables = list(range(NUM_PAGES)), dict[int, list[int]]()

    async def place(transfer_id: int, block: KVBlock) -> None:
        await asyncio.sleep(rng.random() / 300)
        write_block(pool, np.array(tables[transfer_id]), block)
        placed[0] += 1

    def complete(transfer_id: int, report: TransferReport) -> None:
        child.say(complete=transfer_id, bytes=report.bytes)

    def failed(transfer_id: int, failure: TransferFailed) -> None:
        child.say(failed=transfer_id, code=failure.code, message=failure.message)

    server = KVServer(replace(RECEIVER, epoch=epoch), place, complete, failed)
    child.say(port=await server.start("127.0.0.1", port), **child.held())
    while True:
        command = await child.command()
        transfer_id = int(str(command["transfer"]))
        if command["do"] == "expect":
            table = tables[transfer_id] = [free.pop(rng.randrange(len(free))) for _ in range(NUM_TAKEN)]
            server.expect(transfer_id, TOKENS)
            child.say(expected=transfer_id, table=table)
        else:
            if transfer_id in tables:
                await server.fence(transfer_id)
                free += tables.pop(transfer_id)
            counters = server.counters
            child.say(fenced=transfer_id, num_open=counters.num_open, num_free=len(free), refused=counters.frames_refused, **child.held())


async def send(child: Child, epoch: int) -> None:
    sender = KVSender(replace(SENDER, epoch=epoch), SETTINGS)
    child.say(sender=epoch, **child.held())
    pushes = set[asyncio.Task[None]]()

    async def push(command: Message) -> None:
        transfer_id, resume = int(str(command["transfer"])), bool(command["resume"])
        where = ("127.0.0.1", int(str(command["port"])), int(str(command["epoch"])))
        transfer = sender.open(*where, transfer_id, TOKENS, resume=resume)
        for start in range(TOKENS.start, TOKENS.stop, CHUNK):
            for block in blocks_of(SPEC, PLANES, TokenRange(start, min(start + CHUNK, TOKENS.stop))):
                transfer.push(block)
        try:
            report = await transfer.done()
            child.say(done=transfer_id, bytes=report.bytes)
        except TransferFailed as failure:
            child.say(lost=transfer_id, code=failure.code)

    while True:
        command = await child.command()
        if command["do"] == "push":
            task = asyncio.create_task(push(command))
            pushes.add(task)
            task.add_done_callback(pushes.discard)
        else:
            num_open = sender.counters.num_open
            await sender.close()
            child.say(closed=epoch, num_open=num_open, **child.held())


async def live(control: str, name: str, role: str, arguments: list[str]) -> None:
    reader, writer = await asyncio.open_unix_connection(control)
    child = Child(reader, writer)
    child.say(name=name)
    if role == "receive":
        await receive(child, int(arguments[0]), int(arguments[1]), Path(arguments[2]))
    else:
        await send(child, int(arguments[0]))


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not waited for
    for line in sys.stdin:
        name, role, *arguments = line.split()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                asyncio.run(live(sys.argv[1], name, role, arguments))
            finally:
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
