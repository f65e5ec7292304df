"""How much of a rate-limited line the TCP link fills: two network namespaces, a veth pair, `tc tbf` at both of its ends. Needs root.

python benchmarks/link_tbf.py [--json FILE] [--rates 200 1000] [--rounds N] [--seconds S] [--congestion-control NAME] [--mtu N]

tbf counts Ethernet, IP and TCP headers, and every frame of ours has a header too, so payload can never fill the rate. Per rate:
``line``: bytes that tbf let through from the first push to the last acknowledgement, over rate times that time ·
``goodput``: acknowledged payload over rate times time · ``of_possible``: goodput over the share of full packets that is payload
(1448 of 1514 bytes at an MTU of 1500). The target is for ``line`` and ``of_possible``. Median of the rounds; the connections are warm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from pddbridge.engine import KVBlock
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.kv_transfer import TransferFailed
from pddbridge.links.tcp import Handshake, KVSender, KVServer, SenderSettings

TARGET: Final = 0.97
SPEC: Final = KVSpec.gqa(32, 8, 128, "bfloat16")
PIECE_TOKENS: Final = 16  # 1 MiB of one plane
SENDER: Final = Handshake(1, "benchmark", SPEC, 11, "sender")
RECEIVER: Final = replace(SENDER, epoch=22, name="receiver")
ADDRESS: Final = "10.213.7.2"
PORT: Final = 4739
ETHERNET_BYTES: Final = 14
# IPv4, TCP, and TCP's timestamps.
INNER_HEADER_BYTES: Final = 20 + 20 + 12
BURST: Final = "128kb"
LATENCY: Final = "50ms"
_SENT = re.compile(r"Sent (\d+) bytes")


@dataclass(frozen=True)
class Row:
    rate_mbit_per_s: int
    mtu: int
    connections: int
    megabytes: float
    seconds: float
    line: float
    goodput: float
    of_possible: float
    target: float = TARGET


@contextmanager
def namespaces(mtu: int) -> Iterator[tuple[str, str]]:
    """Two joined ones, by name, gone afterwards whatever happens; their interfaces are ``veth0``."""
    names = (f"pdd-tbf-a{os.getpid()}", f"pdd-tbf-b{os.getpid()}")
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "-n", names[0], "link", "add", "veth0", "type", "veth", "peer", "name", "veth0", "netns", names[1])
        for name, host in zip(names, (1, 2), strict=True):
            run("ip", "-n", name, "addr", "add", f"10.213.7.{host}/24", "dev", "veth0")
            run("ip", "-n", name, "link", "set", "veth0", "mtu", str(mtu), "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def limit(name: str, rate_mbit_per_s: int) -> None:
    run(
        "tc",
        "-n",
        name,
        "qdisc",
        "replace",
        "dev",
        "veth0",
        "root",
        "tbf",
        "rate",
        f"{rate_mbit_per_s}mbit",
        "burst",
        BURST,
        "latency",
        LATENCY,
    )


def sent_bytes() -> int:
    """Since the qdisc was made, in the namespace that this process is in; packets of a batch counted with the headers they will have."""
    found = _SENT.search(run("tc", "-s", "qdisc", "show", "dev", "veth0"))
    assert found
    return int(found[1])


async def receive() -> None:
    """The receiving process: drops what it gets; ends with stdin."""

    async def place(transfer_id: int, block: KVBlock) -> None:
        return None

    def failed(transfer_id: int, failure: TransferFailed) -> None:
        raise AssertionError(f"transfer {transfer_id}: {failure}")

    server = KVServer(RECEIVER, place, lambda *_: None, failed)
    await server.start(ADDRESS, PORT)
    while line := await asyncio.to_thread(sys.stdin.readline):
        transfer_id, num_tokens = map(int, line.split())
        server.expect(transfer_id, TokenRange(0, num_tokens))
        print("expected", flush=True)
    await server.close()


async def send(congestion_control: str | None, connections: int) -> None:
    """The sending process: for each line "transfer tokens" of stdin a transfer, and a line "seconds bytes-on-the-line payload-bytes"."""
    piece = np.random.default_rng(0).integers(0, 1 << 16, (32, PIECE_TOKENS, 8, 128), np.uint16).view(SPEC.np_dtype)
    sender = KVSender(SENDER, SenderSettings(num_connections=connections, congestion_control=congestion_control))
    while line := await asyncio.to_thread(sys.stdin.readline):
        transfer_id, num_tokens = map(int, line.split())
        before = sent_bytes()
        started_s = time.perf_counter()
        transfer = sender.open(ADDRESS, PORT, RECEIVER.epoch, transfer_id, TokenRange(0, num_tokens))
        for first in range(0, num_tokens, PIECE_TOKENS):
            for plane in "kv":
                transfer.push(KVBlock(plane, LayerRange(0, 32), TokenRange(first, first + PIECE_TOKENS), HeadRange(0, 8), piece))
        report = await transfer.done()
        took_s = time.perf_counter() - started_s
        print(took_s, sent_bytes() - before, report.bytes, flush=True)
    await sender.close()


class Peer:
    """One of the two processes, in its namespace."""

    def __init__(self, name: str, *arguments: str) -> None:
        command = ["ip", "netns", "exec", name, sys.executable, __file__, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: str) -> str:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process ended with {self._process.wait()}")
        return answer

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    packet = arguments.mtu + ETHERNET_BYTES
    payload_share = (arguments.mtu - INNER_HEADER_BYTES) / packet
    with namespaces(arguments.mtu) as (here, there):
        receiver = Peer(there, "--role", "receive")
        options = ["--congestion-control", arguments.congestion_control] if arguments.congestion_control else []
        sender = Peer(here, "--role", "send", "--connections", str(arguments.connections), *options)
        try:
            transfer_id = 0
            for rate in arguments.rates:
                for name in (here, there):
                    limit(name, rate)
                per_s = rate * 1e6 / 8
                num_tokens = round(per_s * arguments.seconds / SPEC.bytes_per_token / PIECE_TOKENS) * PIECE_TOKENS
                rounds = []
                for round_number in range(arguments.rounds + 1):
                    transfer_id += 1
                    # The first one warms the connections up at this rate.
                    order = (
                        f"{transfer_id} {num_tokens if round_number else max(PIECE_TOKENS, num_tokens // PIECE_TOKENS // 4 * PIECE_TOKENS)}"
                    )
                    receiver.ask(order)
                    took_s, on_line, payload = map(float, sender.ask(order).split())
                    if round_number:
                        rounds.append((took_s, on_line, payload))
                took_s = statistics.median(took for took, _, _ in rounds)
                line = statistics.median(on_line / took / per_s for took, on_line, _ in rounds)
                goodput = statistics.median(payload / took / per_s for took, _, payload in rounds)
                yield Row(
                    rate,
                    arguments.mtu,
                    arguments.connections,
                    round(rounds[0][2] / 1e6, 1),
                    round(took_s, 3),
                    round(line, 4),
                    round(goodput, 4),
                    round(goodput / payload_share, 4),
                )
        finally:
            sender.close()
            receiver.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rates", type=int, nargs="+", default=[200, 1000], help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of sending at the whole rate, per round")
    parser.add_argument("--connections", type=int, default=SenderSettings().num_connections)
    parser.add_argument("--congestion-control", help="the kernel's name; the system's default unless given")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--role", choices=("receive", "send"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "receive":
        asyncio.run(receive())
        return
    if arguments.role == "send":
        asyncio.run(send(arguments.congestion_control, arguments.connections))
        return
    if os.geteuid():
        parser.error("network namespaces need root")
    rows = []
    print(f"{'Mbit/s':>7} {'MB':>7} {'seconds':>8} {'line':>7} {'goodput':>8} {'of possible':>12}   target {TARGET:.2f}")
    for row in measure(arguments):
        rows.append(row)
        verdict = "ok" if min(row.line, row.of_possible) >= TARGET else "short"
        print(
            f"{row.rate_mbit_per_s:7} {row.megabytes:7.1f} {row.seconds:8.3f} "
            f"{row.line:7.4f} {row.goodput:8.4f} {row.of_possible:12.4f}   {verdict}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
