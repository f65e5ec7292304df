"""Goodput of the links between two processes of one host, taken in turns in one run, as ratios to TCP on loopback.

python benchmarks/links_in_site.py [--json FILE] [--rounds N] [--links tcp,shm,nixl]

The receiver drops what it gets: placing costs the same on every link. Prints one row per link: median and spread of GB/s, CPU seconds of
both processes per GB, and the ratio of medians to TCP's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import secrets
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.kv_transfer import TransferFailed
from pddbridge.links.nixl import NixlAgent, NixlSender, NixlServer
from pddbridge.links.shm import ShmSender, ShmServer
from pddbridge.links.slot_sender import SlotSender
from pddbridge.links.tcp import Handshake, KVSender, KVServer

SPEC = KVSpec.gqa(32, 8, 128, "bfloat16")
TOKENS = TokenRange(0, 2048)  # 268 MB
PIECE_TOKENS = 64  # 4 MiB of one plane
SENDER = Handshake(1, "benchmark", SPEC, 11, "sender")
WARM_UP_ROUNDS = 1
TARGET = 4.0


async def _serve(pipe: Connection, epoch: int, num_transfers: int, with_nixl: bool) -> None:
    handshake = replace(SENDER, epoch=epoch, name="receiver")

    def failed(transfer_id: int, failure: TransferFailed) -> None:
        raise AssertionError(f"transfer {transfer_id}: {failure}")

    async def place(transfer_id: int, block: KVBlock) -> None:
        return None

    server = KVServer(handshake, place, lambda *_: None, failed)
    for transfer_id in range(1, num_transfers + 1):
        server.expect(transfer_id, TOKENS)
    shm = ShmServer(handshake, server.incoming)
    shm.start()
    ports = {"tcp": await server.start("127.0.0.1", 0), "shm": 0}
    nixl: NixlServer | None = None
    if with_nixl:
        agent = NixlAgent("receiver")
        await agent.start()
        nixl = NixlServer(handshake, server.incoming, agent)
        ports["nixl"] = await nixl.start("127.0.0.1")
    pipe.send(ports)
    while await asyncio.to_thread(pipe.recv) is not None:
        pipe.send(time.process_time())
    if nixl is not None:
        await nixl.close()
        await agent.close()
    await shm.close()
    await server.close()


def _receiver(pipe: Connection, epoch: int, num_transfers: int, with_nixl: bool) -> None:
    asyncio.run(_serve(pipe, epoch, num_transfers, with_nixl))


async def _measure(pipe: Connection, epoch: int, links: list[str], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Per link: (GB/s, CPU seconds of both processes per GB) of each round."""
    ports = pipe.recv()
    # As a prefill worker reads it: a few MiB at a time, still in the cache when they are sent.
    piece = np.random.default_rng(1).integers(0, 1 << 16, (32, PIECE_TOKENS, 8, 128), np.uint16).view(SPEC.np_dtype)
    blocks = [
        KVBlock(plane.name, LayerRange(0, 32), TokenRange(start, start + PIECE_TOKENS), HeadRange(0, 8), piece)
        for start in range(0, len(TOKENS), PIECE_TOKENS)
        for plane in SPEC.groups[0].planes
    ]
    async with AsyncExitStack() as stack:
        senders: dict[str, KVSender | SlotSender] = {"tcp": KVSender(SENDER), "shm": ShmSender(SENDER)}
        if "nixl" in links:
            agent = NixlAgent("sender")
            await agent.start()
            stack.push_async_callback(agent.close)
            senders["nixl"] = NixlSender(SENDER, agent)
        for sender in senders.values():
            stack.push_async_callback(sender.close)
        results: dict[str, list[tuple[float, float]]] = {link: [] for link in links}
        transfer_id = 0
        for round_number in range(WARM_UP_ROUNDS + rounds):
            for link in links:
                transfer_id += 1
                cpu_s = time.process_time() + _cpu_s(pipe)
                started_s = time.perf_counter()
                transfer = senders[link].open("127.0.0.1", ports[link], epoch, transfer_id, TOKENS)
                for block in blocks:
                    transfer.push(block)
                report = await transfer.done()
                taken_s = time.perf_counter() - started_s
                cpu_s = time.process_time() + _cpu_s(pipe) - cpu_s
                if round_number >= WARM_UP_ROUNDS:
                    results[link].append((report.bytes / 1e9 / taken_s, cpu_s / (report.bytes / 1e9)))
    return results


def _cpu_s(pipe: Connection) -> float:
    pipe.send("cpu")
    cpu_s: float = pipe.recv()
    return cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--links", default="tcp,shm")
    arguments = parser.parse_args()
    links = arguments.links.split(",")
    ours, theirs = multiprocessing.Pipe()
    epoch, num_transfers = secrets.randbits(64), len(links) * (arguments.rounds + WARM_UP_ROUNDS)
    process = multiprocessing.get_context("spawn").Process(target=_receiver, args=(theirs, epoch, num_transfers, "nixl" in links))
    process.start()
    try:
        results = asyncio.run(_measure(ours, epoch, links, arguments.rounds))
    finally:
        ours.send(None)
        process.join()
    medians = {link: statistics.median(goodput for goodput, _ in rows) for link, rows in results.items()}
    table = [
        {
            "link": link,
            "goodput_gb_s": round(medians[link], 3),
            "min_gb_s": round(min(goodput for goodput, _ in rows), 3),
            "max_gb_s": round(max(goodput for goodput, _ in rows), 3),
            "cpu_s_per_gb": round(statistics.median(cpu for _, cpu in rows), 3),
            "ratio_to_tcp": round(medians[link] / medians["tcp"], 2) if "tcp" in medians else None,
            "target": TARGET if link == "shm" else None,
        }
        for link, rows in results.items()
    ]
    for row in table:
        print("  ".join(f"{key} {value}" for key, value in row.items() if value is not None))
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
