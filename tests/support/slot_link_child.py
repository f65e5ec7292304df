"""One end of a transfer over shared memory or NIXL as a process of its own, to be killed or stopped:
``python -m tests.support.slot_link_child send|lent|receive shm|nixl EPOCH [NIXL_PORT]``.

send: pushes the whole of ``TOKENS`` to the receiver with EPOCH, then waits. lent: the same, its blocks made in slots that the link lends,
one of which it never finishes. receive: listens under EPOCH, places ``PLACED_FIRST`` frames of whatever transfers and then
never returns from placing. Each prints one line when it is there; that of a receiver that listens ends with its NIXL port.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from pddbridge.engine import KVBlock
from pddbridge.kv_block import arrays_in, room_for
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.links.nixl import NixlAgent, NixlSender, NixlServer
from pddbridge.links.outgoing import OutgoingTransfer
from pddbridge.links.shm import ShmSender, ShmServer
from pddbridge.links.tcp import Handshake, KVServer
from tests.support.kv import blocks_of, random_planes

SPEC = KVSpec.gqa(4, 3, 8, "bfloat16")
TOKENS = TokenRange(5, 100)
PLANES = random_planes(SPEC, TOKENS.stop, seed=3)
SENDER = Handshake(1, "f1", SPEC, 11, "prefill-1")
PLACED_FIRST = 3
CHUNK = 16
TRANSFER_ID, LATER_IDS = 1, range(2, 10)


async def start_agent(epoch: int) -> NixlAgent:
    agent = NixlAgent(f"child-{epoch:x}")
    await agent.start()
    return agent


async def send(link: str, epoch: int, port: int) -> None:
    sender = ShmSender(SENDER) if link == "shm" else NixlSender(SENDER, await start_agent(epoch ^ 1))
    transfer = sender.open("127.0.0.1", port, epoch, TRANSFER_ID, TOKENS)
    for token in range(TOKENS.start, TOKENS.stop):
        for block in blocks_of(SPEC, PLANES, TokenRange(token, token + 1)):
            transfer.push(block)
    while sender.counters.bytes_sent == 0:
        await asyncio.sleep(0.002)
    print("sending", flush=True)
    await transfer.done()


async def lent(_: str, epoch: int, port: int) -> None:
    sender = ShmSender(SENDER)
    transfer = sender.open("127.0.0.1", port, epoch, TRANSFER_ID, TOKENS)
    for start in range(TOKENS.start, TOKENS.stop, CHUNK):
        for block in lent_blocks(transfer, TokenRange(start, min(start + CHUNK, TOKENS.stop))):
            transfer.push(block)
    assert transfer.lend is not None
    unfinished = transfer.lend(1000, False)
    assert unfinished is not None
    unfinished[:500] = 7
    while sender.counters.bytes_sent == 0:
        await asyncio.sleep(0.002)
    assert sender.counters.frames_copied == 0
    print("sending", flush=True)
    await transfer.done()


def lent_blocks(transfer: OutgoingTransfer, tokens: TokenRange, *, shared: bool = False) -> list[KVBlock]:
    """All KV of ``tokens`` of ``PLANES``, made in a slot of the transfer's link."""
    assert transfer.lend is not None
    memory = transfer.lend(room_for(SPEC, len(tokens)), shared)
    assert memory is not None
    made = list(zip(blocks_of(SPEC, PLANES, tokens), arrays_in(memory, SPEC, len(tokens)), strict=True))
    for block, place in made:
        place[...] = block.values
    return [replace(block, values=place) for block, place in made]


async def receive(link: str, epoch: int, _: int) -> None:
    num_placed = 0

    async def place(transfer_id: int, block: KVBlock) -> None:
        nonlocal num_placed
        if num_placed == PLACED_FIRST:
            print("placing", flush=True)
            await asyncio.Event().wait()
        num_placed += 1

    handshake = replace(SENDER, epoch=epoch, name="main-1")
    server = KVServer(handshake, place, lambda *_: None, lambda *_: None)
    for transfer_id in (TRANSFER_ID, *LATER_IDS):
        server.expect(transfer_id, TOKENS)
    port = 0
    if link == "shm":
        shm = ShmServer(handshake, server.incoming)
        shm.start()
    else:
        nixl = NixlServer(handshake, server.incoming, await start_agent(epoch))
        port = await nixl.start("127.0.0.1")
    print(f"listening {port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(
        {"send": send, "lent": lent, "receive": receive}[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int((sys.argv[4:] or ["1"])[0]))
    )
