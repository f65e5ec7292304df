"""A worker's peers follow the topology while it runs: who joins is one, who leaves is none any more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from pdd.launch.held_ports import HeldPorts
from pdd.launch.plan import plan_topology, plan_worker
from pdd.worker.neighbours import Neighbours
from tests.support.deployments import launch_config
from tests.support.fake_engine import FakeEngine, expected_log
from tests.support.worker_harness import WorkerHarness

PROMPT = list(range(40, 70))


def test_everything_follows_the_topology_in_place() -> None:
    config = launch_config("m")
    topology = plan_topology(config)
    prefill = config.workers[0]
    seen = Neighbours(config, prefill, topology)
    receivers, known, remote, rules, behind = seen.receivers, seen.known, seen.remote, seen.rules, seen.shared.behind
    assert set(receivers) == {"relay-0", "main-0"}
    assert known == {"prefill-0": "prefill", "relay-0": "relay", "main-0": "main"}
    more = config.workers[2].model_copy(update={"name": "main-1"})
    place = plan_worker(config, more, HeldPorts())
    seen.apply(replace(topology, workers=(*topology.workers, place)))
    near = place.route("a").kv
    assert near != place.kv, "over the emulated link"
    assert receivers["main-1"] == ((near.host, near.port), (place.kv.host, place.kv.port))
    assert known["main-1"] == "main"
    assert remote == {"main-0", "main-1"}
    assert behind["main-1"] == behind["main-0"] in seen.shared.rules
    assert (near.host, near.port) in rules
    seen.apply(replace(topology, workers=topology.workers[:2]))
    assert (set(receivers), set(known), remote, rules, behind) == ({"relay-0"}, {"prefill-0", "relay-0"}, set(), {}, {})


def test_somebody_who_is_met_before_we_were_told_is_looked_up_in_the_operators_file(tmp_path: Path) -> None:
    config = launch_config("m")
    topology, file = plan_topology(config), tmp_path / "main.json"
    topology.save(file)
    seen = Neighbours(config, config.workers[0], topology, file)
    assert "main-1" not in seen.known
    place = plan_worker(config, config.workers[2].model_copy(update={"name": "main-1"}), HeldPorts())
    replace(topology, workers=(*topology.workers, place)).save(file)
    near = place.route("a").kv
    assert seen.receivers.get("main-1") == ((near.host, near.port), (place.kv.host, place.kv.port))
    assert "main-1" in seen.known
    assert seen.receivers.get("stranger") is None
    file.write_text("{")
    assert "stranger" not in seen.known
    assert "main-1" in seen.known, "the former one holds"


async def test_a_worker_that_joins_becomes_a_legal_peer_and_one_that_leaves_stops_being_one() -> None:
    peers: dict[str, str] = {}
    receivers: dict[str, tuple[tuple[str, int], ...]] = {}
    async with (
        WorkerHarness("main", FakeEngine, peers=peers) as main,
        WorkerHarness("prefill", FakeEngine, receivers=receivers) as prefill,
    ):
        for step in ("unknown", "joined", "left"):
            if step == "joined":
                receivers["main"], peers["prefill"] = (("127.0.0.1", main.kv_port),), "prefill"
            elif step == "left":
                del receivers["main"]
            stream = main.attach().open(f"r-{step}", [*PROMPT, len(step)], transfer=True, max_tokens=4, tenant=step)
            target = main.target((await stream.until("reserved")).reserved)
            sender = prefill.attach().open(f"r-{step}", [*PROMPT, len(step)], decode=False, push_to=[target], tenant=step)
            if step == "joined":
                await sender.until("pushed")
                assert await stream.tokens(4) == expected_log([*PROMPT, len(step)], 4)
                await sender.half_close()
            else:
                with pytest.raises(grpc.aio.AioRpcError, match="the topology has"):
                    await sender.until("pushed")
            await stream.half_close()
