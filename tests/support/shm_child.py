"""One end of a shared-memory transfer as a process of its own, to be killed: ``python -m tests.support.shm_child send|receive EPOCH``.

send: pushes the whole of ``TOKENS`` to the receiver with EPOCH, then waits. receive: listens under EPOCH, places ``PLACED_FIRST`` frames
and then never returns from placing. Each prints one line when it is there.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from pddbridge.engine import KVBlock
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.links.shm import ShmSender, ShmServer
from pddbridge.links.tcp import Handshake, KVServer
from tests.support.kv import blocks_of, random_planes

SPEC = KVSpec.gqa(4, 3, 8, "bfloat16")
TOKENS = TokenRange(5, 100)
PLANES = random_planes(SPEC, TOKENS.stop, seed=3)
SENDER = Handshake(1, "f1", SPEC, 11, "prefill-1")
PLACED_FIRST = 3
TRANSFER_ID = 1


async def send(epoch: int) -> None:
    sender = ShmSender(SENDER)
    transfer = sender.open("127.0.0.1", 1, epoch, TRANSFER_ID, TOKENS)
    for token in range(TOKENS.start, TOKENS.stop):
        for block in blocks_of(SPEC, PLANES, TokenRange(token, token + 1)):
            transfer.push(block)
    while sender.counters.bytes_sent == 0:
        await asyncio.sleep(0.002)
    print("sending", flush=True)
    await transfer.done()


async def receive(epoch: int) -> None:
    num_placed = 0

    async def place(transfer_id: int, block: KVBlock) -> None:
        nonlocal num_placed
        if num_placed == PLACED_FIRST:
            print("placing", flush=True)
            await asyncio.Event().wait()
        num_placed += 1

    handshake = replace(SENDER, epoch=epoch, name="main-1")
    server = KVServer(handshake, place, lambda *_: None, lambda *_: None)
    server.expect(TRANSFER_ID, TOKENS)
    shm = ShmServer(handshake, server.incoming)
    shm.start()
    print("listening", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run({"send": send, "receive": receive}[sys.argv[1]](int(sys.argv[2])))
