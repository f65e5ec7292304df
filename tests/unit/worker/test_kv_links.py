"""Which link a push takes, and that a worker's KV comes over each of them: real sockets and shared memory, the in-test engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdd.config import LaunchConfig
from pdd.launch.plan import plan_topology
from pdd.topology import Topology
from pddbridge.links import shm_io
from pddbridge.links.shm import SlotSettings
from pddbridge.rpc.gen import worker_pb2
from tests.support.deployments import launch_config
from tests.support.fake_engine import KV_SPEC, FakeEngine, expected_log
from tests.support.worker_harness import Attached, WorkerHarness

PROMPT = list(range(40, 63))
NOT_HERE = "shm: the receiver is not on this host"


async def push(prefill: WorkerHarness, receiver: WorkerHarness, link: str, prompt: Sequence[int] = PROMPT) -> Attached:
    """The receiver's stream, its KV complete."""
    stream = receiver.attach().open(f"r-{link}", prompt, transfer=True, max_tokens=4, tenant=link)
    target = receiver.target((await stream.until("reserved")).reserved)
    target.link, target.nixl_port = link, (await receiver.stub.Info(worker_pb2.InfoRequest())).nixl_port
    sender = prefill.attach().open(f"r-{link}", prompt, decode=False, push_to=[target], tenant=link)
    pushed = (await sender.until("pushed")).pushed
    assert (pushed.tokens, pushed.bytes) == (len(prompt) - 1, (len(prompt) - 1) * KV_SPEC.bytes_per_token)
    await stream.until("kv_complete")
    await sender.half_close()
    return stream


@pytest.mark.parametrize(("link", "takes"), [("", "tcp"), ("tcp", "tcp"), ("shm", "shm"), ("auto", "shm")])
async def test_kv_takes_the_link_that_was_asked_for(link: str, takes: str) -> None:
    async with WorkerHarness("prefill", FakeEngine) as prefill, WorkerHarness("main", FakeEngine) as main:
        stream = await push(prefill, main, link)
        assert await stream.tokens(4) == expected_log(PROMPT, 4)
        ledger = await prefill.ledger()
        assert (dict(ledger.kv_pushes), dict(ledger.kv_link_fallbacks)) == ({takes: 1}, {})
        assert ledger.kv_bytes_sent == (await main.ledger()).kv_bytes_received == 22 * KV_SPEC.bytes_per_token
        sent = prefill.traffic.links.sender_counters
        assert (sent.frames_in_place > 0, sent.frames_copied) == (takes == "shm", 0)
        info = await main.stub.Info(worker_pb2.InfoRequest())
        assert list(info.kv_links) == ["tcp", "shm"]
        await stream.half_close()


async def test_relay_and_main_share_a_read_that_is_made_in_the_relay_s_memory() -> None:
    async with (
        WorkerHarness("prefill", FakeEngine) as prefill,
        WorkerHarness("relay", FakeEngine) as relay,
        WorkerHarness("main", FakeEngine) as main,
    ):
        streams, targets = [], []
        for receiver, link in ((relay, "shm"), (main, "tcp")):
            streams.append(receiver.attach().open("r", PROMPT, transfer=True, max_tokens=4))
            targets.append(receiver.target((await streams[-1].until("reserved")).reserved))
            targets[-1].link = link
        sender = prefill.attach().open("r", PROMPT, decode=False, push_to=targets)
        for _ in targets:
            await sender.until("pushed")
        for stream in streams:
            await stream.until("kv_complete")
            assert await stream.tokens(4) == expected_log(PROMPT, 4)
            await stream.half_close()
        await sender.half_close()
        sent = prefill.traffic.links.sender_counters
        assert (sent.frames_in_place > 0, sent.frames_copied) == (True, 0)
        assert dict((await prefill.ledger()).kv_link_fallbacks) == {}
        (peer,) = prefill.traffic.links._shm._peers.values()
        assert peer.lender.loans is not None
        async with asyncio.timeout(5):  # nobody holds on to what was read
            while peer.lender.loans.num_free < SlotSettings().num_loans:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("link", ["shm", "auto"])
async def test_a_receiver_elsewhere_gets_its_kv_over_tcp_and_the_fallback_is_counted(link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with WorkerHarness("prefill", FakeEngine) as prefill:
        with monkeypatch.context() as patch:
            patch.setattr(shm_io, "supported", lambda: False)
            main = WorkerHarness("main", FakeEngine)
            await main.__aenter__()
        try:
            stream = await push(prefill, main, link)
            assert await stream.tokens(4) == expected_log(PROMPT, 4)
            ledger = await prefill.ledger()
            assert (dict(ledger.kv_pushes), dict(ledger.kv_link_fallbacks)) == ({"tcp": 1}, {NOT_HERE: 1})
            theirs = await main.ledger()
            assert [(reason.split(":")[0], count) for reason, count in theirs.kv_link_fallbacks.items()] == [("shm", 1)]
            assert list((await main.stub.Info(worker_pb2.InfoRequest())).kv_links) == ["tcp"]
            await stream.half_close()
        finally:
            await main.__aexit__(None, None, None)


@pytest.mark.parametrize(("link", "takes"), [("auto", "nixl"), ("nixl", "nixl"), ("shm", "shm"), ("tcp", "tcp")])
async def test_nixl_is_taken_where_both_have_it(link: str, takes: str) -> None:
    pytest.importorskip("nixl_cu13", reason="the optional extra nixl is not installed")
    async with (
        WorkerHarness("prefill", FakeEngine, with_nixl=True) as prefill,
        WorkerHarness("main", FakeEngine, with_nixl=True) as main,
        WorkerHarness("without", FakeEngine) as without,
    ):
        for receiver in (main, without):
            stream = await push(prefill, receiver, link)
            assert await stream.tokens(4) == expected_log(PROMPT, 4)
            await stream.half_close()
        ledger = await prefill.ledger()
        if takes == "nixl":
            assert dict(ledger.kv_pushes) == {"nixl": 1, "shm": 1}
            assert dict(ledger.kv_link_fallbacks) == {"nixl: not at the receiver": 1}
        else:
            assert (dict(ledger.kv_pushes), dict(ledger.kv_link_fallbacks)) == ({takes: 2}, {})
        assert list((await main.stub.Info(worker_pb2.InfoRequest())).kv_links) == ["tcp", "shm", "nixl"]


async def test_nixl_that_is_asked_for_and_not_here_is_a_fallback() -> None:
    async with WorkerHarness("prefill", FakeEngine) as prefill, WorkerHarness("main", FakeEngine) as main:
        await (await push(prefill, main, "nixl")).half_close()
        ledger = await prefill.ledger()
        assert (dict(ledger.kv_pushes), dict(ledger.kv_link_fallbacks)) == ({"shm": 1}, {"nixl: not here": 1})


async def test_an_unknown_link_is_refused() -> None:
    async with WorkerHarness("prefill", FakeEngine) as prefill:
        target = worker_pb2.PushTarget(target="main", host="h", port=1, epoch=1, transfer_id=1, link="pigeon")
        with pytest.raises(Exception, match=r"push_to\[0\].link: given 'pigeon'"):
            await prefill.attach().open("r", PROMPT, push_to=[target]).next()


@pytest.mark.parametrize("choice", ["auto", "nixl", "shm", "tcp"])
def test_only_routes_within_a_site_take_the_local_link(choice: str, tmp_path: Path) -> None:
    config = LaunchConfig.model_validate({**launch_config("tiny").model_dump(), "local_link": choice})
    topology = plan_topology(config)
    links = {(place.name, route.from_site): route.kv_link for place in topology.workers for route in place.routes}
    assert links == {
        ("prefill-0", "a"): choice,
        ("prefill-0", "b"): "tcp",
        ("relay-0", "a"): choice,
        ("relay-0", "b"): "tcp",
        ("main-0", "a"): "tcp",
        ("main-0", "b"): choice,
    }
    path = tmp_path / "topology.json"
    topology.save(path)
    assert Topology.load(path) == topology
    with pytest.raises(ValueError, match="local_link"):
        LaunchConfig.model_validate({**config.model_dump(), "local_link": "pigeon"})
