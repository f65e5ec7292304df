"""How long transfers take that share an emulated wide-area link, per schedule, on a skewed mix.

python benchmarks/link_schedule.py [--json FILE] [--rate-mbit-s R] [--rtt-ms T] [--seconds S] [--load L] [--seed N]

The same arrivals for every schedule: a huge transfer in 30, one of 1-5 % of its size else, exponential gaps, ``load`` of the link's rate on
average; one transfer in 15 is of the background class, any size. Two receivers behind one link, each transfer to one of them at random. A
transfer is pushed whole when it arrives and has taken its time when its last frame is acknowledged. The deadline of each is twice its time
on an empty link, and 0.5 s. Rows: seconds P50/P90/P99/max per kind, the share of deadlines met, the share of the rate that payload had
while anything was under way. "kernel buffers": fair turns with what the kernel takes unbounded, frames of up to 1 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from pdd.config import EmulatedLink
from pdd.launch.link_emulator import LinkEmulator, ProxyPort
from pdd.topology import Address
from pddbridge.engine import KVBlock
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.kv_transfer import TransferFailed
from pddbridge.link_schedule import SCHEDULES, LinkRules, Priority
from pddbridge.links.tcp import Handshake, KVSender, KVServer, SenderSettings

SPEC: Final = KVSpec.gqa(30, 3, 64, "bfloat16")  # 23 KB a token
PIECE_TOKENS: Final = 182  # about 4 MiB a read
LINK: Final = "a-b"
SENDER: Final = Handshake(1, "benchmark", SPEC, 11, "sender")
BOTH: Final = tuple(replace(SENDER, epoch=21 + i, name=f"main-{i}") for i in range(2))
Kind = Literal["small", "huge", "background"]
KINDS: Final[tuple[Kind, ...]] = ("small", "huge", "background")


@dataclass(frozen=True)
class Arrival:
    at_s: float
    num_tokens: int
    kind: Kind
    receiver: int
    deadline_s: float


@dataclass(frozen=True)
class Times:
    """Seconds from arrival to the last acknowledgement."""

    num: int
    p50: float
    p90: float
    p99: float
    max: float
    deadlines_met: float


@dataclass(frozen=True)
class Row:
    schedule: str
    small: Times
    huge: Times
    background: Times
    rate_used: float
    turns: dict[str, int]


def make_arrivals(rate_bytes_s: float, seconds: float, load: float, huge_s: float, rtt_s: float, seed: int) -> list[Arrival]:
    """A huge transfer takes ``huge_s`` of the link alone; the first comes early."""
    draw = random.Random(seed)
    huge_tokens = int(rate_bytes_s * huge_s / SPEC.bytes_per_token)
    mean_bytes = huge_tokens * SPEC.bytes_per_token * (1 + 29 * 0.03) / 30
    arrivals: list[Arrival] = []
    at_s = 0.0
    while True:
        at_s += draw.expovariate(load * rate_bytes_s / mean_bytes)
        if at_s > seconds:
            return arrivals
        number = len(arrivals)
        is_huge = number % 30 == 3
        num_tokens = huge_tokens if is_huge else max(1, round(huge_tokens * draw.uniform(0.01, 0.05)))
        kind: Kind = "background" if number % 15 == 7 else "huge" if is_huge else "small"
        alone_s = num_tokens * SPEC.bytes_per_token / rate_bytes_s + rtt_s
        arrivals.append(Arrival(at_s, num_tokens, kind, draw.randrange(2), 0.5 + 2 * alone_s))


def times_of(taken: Sequence[tuple[Arrival, float]], kind: Kind) -> Times:
    those = [(arrival, took_s) for arrival, took_s in taken if arrival.kind == kind]
    seconds = [took_s for _, took_s in those]
    p50, p90, p99 = (float(np.percentile(seconds, q)) for q in (50, 90, 99))
    met = sum(took_s <= arrival.deadline_s for arrival, took_s in those) / len(those)
    return Times(len(those), p50, p90, p99, max(seconds), met)


async def _run(schedule: str, settings: SenderSettings, arrivals: Sequence[Arrival], link: EmulatedLink, huge_frames: bool) -> Row:
    async def place(transfer_id: int, block: KVBlock) -> None:
        return None

    def failed(transfer_id: int, failure: TransferFailed) -> None:
        raise AssertionError(f"transfer {transfer_id}: {failure}")

    async with AsyncExitStack() as stack:
        emulator = LinkEmulator()
        stack.push_async_callback(emulator.close)
        servers, addresses = [], []
        for handshake in BOTH:
            server = KVServer(handshake, place, lambda *_: None, failed)
            port = await server.start("127.0.0.1", 0)
            stack.push_async_callback(server.close)
            servers.append(server)
            target = ProxyPort("a", "b", Address("127.0.0.1", 0), Address("127.0.0.1", port))
            addresses.append(await emulator.add(target, link))
        rules = LinkRules("fair" if huge_frames else schedule)  # type: ignore[arg-type]
        sender = KVSender(SENDER, settings, {LINK: rules})
        stack.push_async_callback(sender.close)
        largest = max(arrival.num_tokens for arrival in arrivals)
        values = np.random.default_rng(0).integers(0, 1 << 16, (30, largest, 3, 64), dtype=np.uint16).view(SPEC.np_dtype)

        async def transfer(number: int, arrival: Arrival, started_s: float) -> tuple[Arrival, float]:
            await asyncio.sleep(max(0.0, started_s + arrival.at_s - time.perf_counter()))
            tokens = TokenRange(0, arrival.num_tokens)
            servers[arrival.receiver].expect(number, tokens)
            began_s = time.perf_counter()
            outgoing = sender.open(
                addresses[arrival.receiver].host,
                addresses[arrival.receiver].port,
                BOTH[arrival.receiver].epoch,
                number,
                tokens,
                priority=Priority.BACKGROUND if arrival.kind == "background" and not huge_frames else Priority.NORMAL,
                link=LINK,
                deadline_s=arrival.deadline_s,
            )
            for first in range(0, tokens.stop, PIECE_TOKENS):
                piece = TokenRange(first, min(tokens.stop, first + PIECE_TOKENS))
                for plane in "kv":
                    outgoing.push(KVBlock(plane, LayerRange(0, 30), piece, HeadRange(0, 3), np.ascontiguousarray(values[:, : len(piece)])))
            await outgoing.done()
            return arrival, time.perf_counter() - began_s

        warm = [Arrival(0.0, 20, "small", receiver, 1.0) for receiver in range(2)]
        now_s = time.perf_counter()
        await asyncio.gather(*(transfer(1_000_000 + i, arrival, now_s) for i, arrival in enumerate(warm)))
        started_s = time.perf_counter()
        taken = await asyncio.gather(*(transfer(i + 1, arrival, started_s) for i, arrival in enumerate(arrivals)))
        busy_s = _busy_s([(a.at_s, a.at_s + took_s) for a, took_s in taken])
        used = sum(a.num_tokens for a in arrivals) * SPEC.bytes_per_token / (busy_s * link.rate_mbit_s * 1e6 / 8)
        small, huge, background = (times_of(taken, kind) for kind in KINDS)
        return Row(schedule, small, huge, background, used, sender.turns)


def _busy_s(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union."""
    total, until = 0.0, 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rate-mbit-s", type=float, default=40.0)
    parser.add_argument("--rtt-ms", type=float, default=30.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=0.85)
    parser.add_argument("--huge-s", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--schedules", nargs="+", default=["kernel buffers", *SCHEDULES])
    arguments = parser.parse_args()
    rate = arguments.rate_mbit_s * 1e6 / 8
    link = EmulatedLink(rate_mbit_s=arguments.rate_mbit_s, rtt_ms=arguments.rtt_ms)
    arrivals = make_arrivals(rate, arguments.seconds, arguments.load, arguments.huge_s, arguments.rtt_ms / 1e3, arguments.seed)
    rows = []
    print(f"{len(arrivals)} transfers, {sum(a.num_tokens for a in arrivals) * SPEC.bytes_per_token / 1e6:.0f} MB")
    for schedule in arguments.schedules:
        bare = schedule == "kernel buffers"
        row = asyncio.run(_run(schedule, SenderSettings(max_unsent_bytes=64 << 20 if bare else None), arrivals, link, bare))
        rows.append(row)
        for kind, times in (("small", row.small), ("huge", row.huge), ("background", row.background)):
            shown = " / ".join(f"{value:6.2f}" for value in (times.p50, times.p90, times.p99, times.max))
            print(f"{schedule:15} {kind:11} {times.num:4}  {shown}  deadlines {times.deadlines_met:5.1%}", flush=True)
        print(f"{schedule:15} rate used {row.rate_used:.3f}  turns {row.turns}", flush=True)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"arguments": {**vars(arguments), "json": None}, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
