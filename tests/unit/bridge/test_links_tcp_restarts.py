"""Either end is killed at a random frame and comes back, again and again: nothing is wrong, nothing is left over."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace

import numpy as np
import pytest

from pddbridge.engine import KVBlock
from pddbridge.kv_convert import KVPool, write_block
from pddbridge.kv_layout import head_major
from pddbridge.kv_spec import HeadRange, LayerRange, TokenRange
from pddbridge.links.tcp import KVSender, KVServer, TransferFailed, TransferReport
from tests.support.kv import canary_pool, fill_slowly, same_pools
from tests.support.tcp_link import FAST, PLANES, RECEIVER, SENDER, SPEC, TOKENS, eventually, push_in_chunks

NUM_FRAMES = 24  # 95 tokens in chunks of 8, two planes


class Receiving:
    """One life of a receiver: its own epoch and its own pages, of which a transfer gets some and canaries stand on the rest."""

    def __init__(self, epoch: int, rng: random.Random) -> None:
        self.pool: KVPool = canary_pool(head_major(12, SPEC.dtype), SPEC, 12)
        self.table = np.array(rng.sample(range(12), 9))
        self.num_placed = 0
        self.completed: list[int] = []
        self.failed: list[TransferFailed] = []
        self._rng = rng
        self.server = KVServer(
            replace(RECEIVER, epoch=epoch), self._place, lambda i, _: self.completed.append(i), lambda _, why: self.failed.append(why)
        )

    async def _place(self, _: int, block: KVBlock) -> None:
        for _ in range(self._rng.randrange(4)):
            await asyncio.sleep(0)
        write_block(self.pool, self.table, block)
        self.num_placed += 1

    async def until_placed(self, num_frames: int) -> None:
        await eventually(lambda: self.num_placed >= num_frames)

    def assert_exact(self) -> None:
        expected = canary_pool(self.pool.layout, SPEC, self.pool.num_pages)
        fill_slowly(expected, self.table, PLANES, LayerRange(0, 4), TOKENS, HeadRange(0, 3))
        assert same_pools(self.pool, expected)


async def end_tasks(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def kill_sender(sender: KVSender) -> None:
    """Its sockets close and that is all: no farewell."""
    await end_tasks([task for peer in sender._peers.values() for task in peer._tasks])


async def kill_receiver(server: KVServer) -> None:
    """Its sockets close and its writers stop where they are: nothing is fenced, nobody is told."""
    acceptor = server._acceptor
    assert acceptor._accepting is not None
    assert acceptor._listener is not None
    await end_tasks([acceptor._accepting, *acceptor._connections, *server.incoming._writers.values()])
    acceptor._listener.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Writers that were created in the moment of the kill never start.
@pytest.mark.filterwarnings("ignore:coroutine 'Receiving._place' was never awaited")
@pytest.mark.parametrize("num_rounds", [12, pytest.param(200, marks=pytest.mark.slow)])
async def test_either_end_dies_at_a_random_frame(num_rounds: int) -> None:
    rng = random.Random(31)
    before_tasks, before_descriptors = asyncio.all_tasks(), num_descriptors()
    epoch = 100
    receiving = Receiving(epoch, rng)
    port = await receiving.server.start("127.0.0.1", 0)
    sender = KVSender(SENDER, FAST)
    num_died = {"sender": 0, "receiver": 0}
    for transfer_id in range(1, num_rounds + 1):
        receiving.pool, receiving.table = canary_pool(receiving.pool.layout, SPEC, 12), np.array(rng.sample(range(12), 9))
        receiving.num_placed = 0
        receiving.server.expect(transfer_id, TOKENS)
        transfer = sender.open("127.0.0.1", port, epoch, transfer_id, TOKENS)
        at = rng.randrange(NUM_FRAMES)
        for start in range(TOKENS.start, TOKENS.stop, 8):
            push_in_chunks(transfer, TokenRange(start, min(start + 8, TOKENS.stop)), chunk=8)
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        await receiving.until_placed(at)
        victim = rng.choice(["sender", "receiver"])
        num_died[victim] += 1
        if victim == "sender":
            await kill_sender(sender)
            sender = KVSender(replace(SENDER, epoch=1000 + transfer_id), FAST)
            again = sender.open("127.0.0.1", port, epoch, transfer_id, TOKENS, resume=True)
        else:
            await kill_receiver(receiving.server)
            epoch += 1
            receiving = Receiving(epoch, rng)
            await receiving.server.start("127.0.0.1", port)
            ended = (await asyncio.gather(transfer.done(), return_exceptions=True))[0]
            # Or every acknowledgement had come already.
            assert isinstance(ended, TransferReport) or (isinstance(ended, TransferFailed) and ended.code == "UNAVAILABLE")
            receiving.server.expect(transfer_id, TOKENS)
            again = sender.open("127.0.0.1", port, epoch, transfer_id, TOKENS)
        push_in_chunks(again, chunk=8)
        assert (await again.done()).bytes == len(TOKENS) * SPEC.bytes_per_token
        assert receiving.completed[-1] == transfer_id
        assert receiving.failed == []
        receiving.assert_exact()
        await receiving.server.fence(transfer_id)
        assert receiving.server.counters.num_open == 0
    assert min(num_died.values()) >= num_rounds // 4
    await sender.close()
    await receiving.server.close()
    await eventually(lambda: asyncio.all_tasks() <= before_tasks)
    assert num_descriptors() <= before_descriptors
