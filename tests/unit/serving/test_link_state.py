"""What workers say of their links reaches the policies and the metrics."""

from __future__ import annotations

import asyncio

from pddbridge.rpc.gen import worker_pb2 as pb
from tests.support.generation import collect, hashed_token, make_request
from tests.support.scripted_workers import serving


def state(receiver: str, link: str, kv_bytes: int, **fields: float) -> pb.LinkState:
    return pb.LinkState(receiver=receiver, link=link, kv_bytes=kv_bytes, kv_wire_bytes=kv_bytes * 4 // 5, codec="ZSTD_PLANES", **fields)  # type: ignore[arg-type]


async def test_links_reach_policies_and_metrics() -> None:
    async with serving(hashed_token) as (cluster, coordinator):
        prefill, relay_worker, main = (coordinator._pool.worker(name) for name in ("prefill-0", "relay-0", "main-0"))
        assert prefill.link_to(main.place) is None
        cluster.worker("prefill").links = [
            state("main-0", "tcp", 9000, goodput_bytes_s=5e9, address="127.0.0.9:9"),  # another coordinator's way to main
            state("main-0", "tcp", 5000, goodput_bytes_s=5e6, wire_bytes_s=4e6, round_trip_s=0.03, queued_bytes=70_000, num_transfers=3),
            state("main-0", "shm", 10),
            state("relay-0", "shm", 9000, queued_bytes=1),
        ]
        async with asyncio.timeout(10):
            while (link := prefill.link_to(main.place)) is None:
                await asyncio.sleep(0.02)
        assert (link.goodput_bytes_s, link.wire_bytes_s, link.round_trip_s) == (5e6, 4e6, 0.03)
        assert (link.queued_bytes, link.num_transfers) == (70_000, 3)
        assert 0 <= link.age_s < 5
        assert coordinator._context.traffic.goodput_bytes_s(("a", "b")) == 5e6
        relay = prefill.link_to(relay_worker.place)
        assert relay is not None
        assert (relay.goodput_bytes_s, relay.round_trip_s, relay.queued_bytes) == (None, None, 1)

        sample = coordinator.metrics.registry.get_sample_value
        to_main = {"worker": "prefill-0", "receiver": "main-0", "link": "tcp"}
        assert sample("pdd:link_goodput_bytes_per_second", to_main) == 5e6
        assert sample("pdd:link_wire_bytes_per_second", to_main) == 4e6
        assert sample("pdd:link_round_trip_seconds", to_main) == 0.03
        assert sample("pdd:link_queued_bytes", to_main) == 70_000
        assert sample("pdd:link_coding_ratio", {**to_main, "codec": "ZSTD_PLANES"}) == 1.25
        assert sample("pdd:link_goodput_bytes_per_second", {**to_main, "link": "shm"}) is None
        assert (await collect(coordinator, make_request())).finish_reason == "length"
