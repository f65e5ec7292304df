"""The TCP link next to a plain socket copy of the same bytes between the same two processes, in turns in one run.

python benchmarks/link_tcp.py [--json FILE] [--rounds N] [--connections N]

Raw: ``sendall`` of 1 MiB pieces and ``recv_into`` of what is there, into 64 MiB of memory in turn, on as many connections as the link has,
without checksums, frames or acknowledgements. On both the bytes are in the receiver's memory when it says so and are not looked at again.
Rows: median GB/s of either, the ratio of medians, header bytes per payload byte. Both processes are busy
all the time on two cores, so anything else that runs there costs the link more than the raw copy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import time
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.kv_transfer import TransferFailed
from pddbridge.kv_wire import FRAME_HEADER_BYTES
from pddbridge.links.tcp import Handshake, KVSender, KVServer, SenderSettings
from pddbridge.native.checksum import Checksum, fastest_checksum

SPEC = KVSpec.gqa(32, 8, 128, "bfloat16")
TOKENS = TokenRange(0, 4096)  # 537 MB
PIECE_TOKENS = 64  # 4 MiB of one plane
CHUNK_BYTES = 1 << 20
TARGET = 0.85
MAX_OVERHEAD = 0.001
RAW_MEMORY_BYTES = 64 << 20
SENDER = Handshake(1, "benchmark", SPEC, 11, "sender")
RECEIVER = replace(SENDER, epoch=22, name="receiver")


@dataclass(frozen=True)
class Row:
    connections: int
    raw_gb_per_s: float
    link_gb_per_s: float
    ratio: float
    frame_overhead: float
    target: float = TARGET


def _checksum() -> Checksum:
    """As workers have it."""
    found, fallbacks = fastest_checksum(None)
    if fallbacks:
        print(f"the package's checksum: {', '.join(fallbacks)}")
    return found


async def _receive_raw(listener: socket.socket, num_bytes: int, num_connections: int) -> None:
    loop = asyncio.get_running_loop()
    memory = memoryview(bytearray(RAW_MEMORY_BYTES // num_connections))

    async def drain(sock: socket.socket) -> None:
        place = 0
        while count := await loop.sock_recv_into(sock, memory[place : place + CHUNK_BYTES]):
            place = (place + count) % (len(memory) - CHUNK_BYTES)
        sock.send(b"!")
        sock.close()

    socks = [(await loop.sock_accept(listener))[0] for _ in range(num_connections)]
    await asyncio.gather(*(drain(sock) for sock in socks))


async def _serve(pipe: Connection, rounds: int, num_connections: int) -> None:
    async def place(transfer_id: int, block: KVBlock) -> None:
        return None

    def failed(transfer_id: int, failure: TransferFailed) -> None:
        raise AssertionError(f"transfer {transfer_id}: {failure}")

    server = KVServer(RECEIVER, place, lambda *_: None, failed, checksum=_checksum())
    for transfer_id in range(1, rounds + 1):
        server.expect(transfer_id, TOKENS)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    pipe.send((await server.start("127.0.0.1", 0), listener.getsockname()[1]))
    for _ in range(rounds):
        await _receive_raw(listener, len(TOKENS) * SPEC.bytes_per_token, num_connections)
        await asyncio.to_thread(pipe.recv)
    await server.close()


def _serve_process(pipe: Connection, rounds: int, num_connections: int) -> None:
    asyncio.run(_serve(pipe, rounds, num_connections))


async def _send_raw(port: int, values: np.ndarray, num_connections: int) -> float:
    loop = asyncio.get_running_loop()
    total = len(TOKENS) * SPEC.bytes_per_token
    view = values.reshape(-1).view(np.uint8).data
    offsets = iter(range(0, total, CHUNK_BYTES))

    async def push(sock: socket.socket) -> None:
        for offset in offsets:
            start = offset % len(view)
            await loop.sock_sendall(sock, view[start : start + CHUNK_BYTES])
        sock.shutdown(socket.SHUT_WR)
        await loop.sock_recv(sock, 1)
        sock.close()

    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_connections)]
    for sock in socks:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    started = time.perf_counter()
    await asyncio.gather(*(push(sock) for sock in socks))
    return time.perf_counter() - started


async def _send_link(sender: KVSender, port: int, transfer_id: int, values: np.ndarray) -> tuple[float, int]:
    transfer = sender.open("127.0.0.1", port, RECEIVER.epoch, transfer_id, TOKENS)
    started = time.perf_counter()
    for first in range(0, len(TOKENS), PIECE_TOKENS):
        for plane in "kv":
            transfer.push(KVBlock(plane, LayerRange(0, 32), TokenRange(first, first + PIECE_TOKENS), HeadRange(0, 8), values))
    report = await transfer.done()
    return time.perf_counter() - started, report.num_frames


async def _measure(rounds: int, num_connections: int) -> Row:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_process, args=(there, rounds, num_connections))
    process.start()
    port, raw_port = await asyncio.to_thread(here.recv)
    rng = np.random.default_rng(0)
    shape = (32, PIECE_TOKENS, 8, 128)
    values = rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(SPEC.np_dtype)
    sender = KVSender(SENDER, SenderSettings(num_connections=num_connections), checksum=_checksum())
    total = len(TOKENS) * SPEC.bytes_per_token
    raw_s, link_s, num_frames = [], [], 0
    for round_number in range(1, rounds + 1):
        raw_s.append(await _send_raw(raw_port, values, num_connections))
        took_s, num_frames = await _send_link(sender, port, round_number, values)
        link_s.append(took_s)
        here.send(None)
    await sender.close()
    await asyncio.to_thread(process.join)
    raw, link = (total / statistics.median(samples) / 1e9 for samples in (raw_s, link_s))
    return Row(num_connections, raw, link, link / raw, num_frames * FRAME_HEADER_BYTES / total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    rows = [asyncio.run(_measure(args.rounds, count)) for count in args.connections]
    print(f"connections  raw GB/s  link GB/s  ratio (target {TARGET})  frame overhead (target below {MAX_OVERHEAD:.1%})")
    for row in rows:
        verdict = "ok" if row.ratio >= TARGET and row.frame_overhead < MAX_OVERHEAD else "short"
        print(
            f"{row.connections:11} {row.raw_gb_per_s:9.2f} {row.link_gb_per_s:10.2f} {row.ratio:6.2f}  {row.frame_overhead:.4%}  {verdict}"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
