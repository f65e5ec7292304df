"""What mutual TLS costs on the TCP link: CPU of both ends in one process, with and without, in turns.

python benchmarks/link_tls.py [--json FILE] [--rounds N]

256 MiB of random KV in pieces of 4 MiB over loopback, one connection. CPU time, so a busy machine disturbs little; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from pdd.certs import issue, make_authority, write_pair
from pddbridge.engine import KVBlock
from pddbridge.kv_spec import HeadRange, KVSpec, LayerRange, TokenRange
from pddbridge.kv_transfer import TransferFailed
from pddbridge.links.tcp import Handshake, KVSender, KVServer, SenderSettings
from pddbridge.tls import LinkTls, TlsFiles, identity

SPEC = KVSpec.gqa(32, 8, 128, "bfloat16")
TOKENS = TokenRange(0, 2048)  # 268 MB
PIECE_TOKENS = 64
SENDER = Handshake(1, "benchmark", SPEC, 11, "prefill-0")
RECEIVER = replace(SENDER, epoch=22, name="main-0")
PEERS: Mapping[str, str] = {"prefill-0": identity("prefill-0", "prefill"), "main-0": identity("main-0", "main")}


@dataclass(frozen=True)
class Row:
    tls: bool
    cpu_s: float
    mib_per_cpu_s: float


def _tls(directory: Path) -> dict[str, LinkTls]:
    """Of both ends, by name."""
    authority = make_authority()
    write_pair(directory, "ca", authority)
    for name, host in PEERS.items():
        write_pair(directory, name, issue(authority, name, (host,)))
    return {
        name: LinkTls.load(TlsFiles(directory / "ca.pem", directory / f"{name}.pem", directory / f"{name}.key"), PEERS) for name in PEERS
    }


async def _move(values: np.ndarray, tls: Mapping[str, LinkTls]) -> float:
    """CPU seconds of one transfer, connecting and handshakes included. ``tls``: empty for none."""

    async def place(transfer_id: int, block: KVBlock) -> None:
        return None

    def failed(transfer_id: int, failure: TransferFailed) -> None:
        raise AssertionError(f"transfer {transfer_id}: {failure}")

    server = KVServer(RECEIVER, place, lambda *_: None, failed, tls=tls.get(RECEIVER.name))
    server.expect(1, TOKENS)
    port = await server.start("127.0.0.1", 0)
    sender = KVSender(SENDER, SenderSettings(num_connections=1, tls=tls.get(SENDER.name)))
    began = time.process_time()
    transfer = sender.open("127.0.0.1", port, RECEIVER.epoch, 1, TOKENS)
    for first in range(0, len(TOKENS), PIECE_TOKENS):
        for plane in "kv":
            transfer.push(KVBlock(plane, LayerRange(0, 32), TokenRange(first, first + PIECE_TOKENS), HeadRange(0, 8), values))
    await transfer.done()
    took_s = time.process_time() - began
    await sender.close()
    await server.close()
    return took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args()
    shape = (32, PIECE_TOKENS, 8, 128)
    values = np.random.default_rng(0).integers(0, 1 << 16, shape, dtype=np.uint16).view(SPEC.np_dtype)
    took_s: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as directory:
        contexts = _tls(Path(directory))
        for _ in range(given.rounds):
            for with_tls in took_s:
                took_s[with_tls].append(asyncio.run(_move(values, contexts if with_tls else {})))
    mib = len(TOKENS) * SPEC.bytes_per_token / 2**20
    rows = [Row(tls, round(median, 3), round(mib / median)) for tls, found in took_s.items() for median in (statistics.median(found),)]
    for row in rows:
        print(f"{'TLS' if row.tls else 'plain'}: {row.cpu_s:.2f} s of CPU for {mib:.0f} MiB, {row.mib_per_cpu_s} MiB per second of CPU")
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
