"""Which codec a worker's pushes take: rules per link from the config, the declared rate until one is measured, lossy only if allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from pdd.config import LaunchConfig
from pdd.launch.plan import plan_topology
from pdd.worker.kv_codecs import CodecChoice, CodecRule, codec_rules, codecs_taken, measure_codecs
from pddbridge.codecs import CodecId
from pddbridge.codecs_base import CodecSpeed
from pddbridge.kv_spec import KVSpec
from pddbridge.links.stats import LinkStats
from pddbridge.rpc.gen import worker_pb2
from tests.support.deployments import launch_config
from tests.support.fake_engine import KV_SPEC, FakeEngine, expected_log
from tests.support.worker_harness import WorkerHarness

FAR = ("127.0.0.1", 4000)
ZSTD = CodecSpeed(CodecId.ZSTD_PLANES, True, 1.45, 0.35e9, 1.0e9)
INT8 = CodecSpeed(CodecId.INT8_BLOCKS, False, 1.88, 0.6e9, 1.6e9)


class Link:
    """One that delivers more and more KV."""

    def __init__(self) -> None:
        self._kv_bytes = self._wire_bytes = 0

    def delivered(self, bytes_per_s: float, ratio: float = 1.0, num_bytes: int = 8 << 20) -> LinkStats:
        self._kv_bytes += num_bytes
        self._wire_bytes += round(num_bytes / ratio)
        return LinkStats(bytes_per_s, bytes_per_s / ratio, 0.05, 0, 0, 2, self._kv_bytes, self._wire_bytes)


def delivered(bytes_per_s: float) -> LinkStats:
    """A link that was seen to deliver so much KV, raw."""
    return Link().delivered(bytes_per_s)


def with_link(**fields: object) -> LaunchConfig:
    raw = launch_config("m", rate_mbit_s=40.0).model_dump(mode="json")
    raw["links"][0].update(fields)
    return LaunchConfig.model_validate(raw)


def test_rules_are_for_receivers_behind_a_declared_link_as_the_sender_reaches_them() -> None:
    config = with_link(codec="auto")
    topology = plan_topology(config)
    rules = codec_rules(config, topology, "a")
    near = topology.worker("main-0").route("a").kv
    assert rules == {(near.host, near.port): CodecRule(None, False, 5e6)}
    assert near != topology.worker("main-0").kv, "the emulated link's near end"
    assert set(codec_rules(config, topology, "b")) == {
        (topology.worker(name).route("b").kv.host, topology.worker(name).route("b").kv.port) for name in ("prefill-0", "relay-0")
    }
    assert codec_rules(with_link(), topology, "a") == rules, "auto is the default"
    assert next(iter(codec_rules(with_link(codec="raw"), topology, "a").values())).fixed is CodecId.RAW
    named = with_link(codec="int8", allow_lossy=True, emulate=None)
    assert list(codec_rules(named, plan_topology(named), "a").values()) == [CodecRule(CodecId.INT8_BLOCKS, True, None)]


def test_lossy_payloads_are_taken_only_where_a_link_allows_them() -> None:
    assert codecs_taken(with_link(), "b") == {CodecId.RAW, CodecId.ZSTD_PLANES}
    assert codecs_taken(with_link(allow_lossy=True), "b") == set(CodecId)
    raw = with_link(allow_lossy=True).model_dump(mode="json")
    raw["sites"].append("c")
    assert codecs_taken(LaunchConfig.model_validate(raw), "c") == {CodecId.RAW, CodecId.ZSTD_PLANES}
    with pytest.raises(ValidationError, match="allow_lossy: true"):
        with_link(codec="fp8")


def test_a_receiver_without_a_rule_gets_raw() -> None:
    choice = CodecChoice({FAR: CodecRule(None, True, 1e6)}, [ZSTD, INT8])
    assert choice.choose(("127.0.0.1", 4001), delivered(1e6)) is CodecId.RAW
    assert CodecChoice({}, ()).choose(FAR, None) is CodecId.RAW


def test_the_declared_rate_counts_until_there_is_a_measured_one() -> None:
    slow = CodecChoice({FAR: CodecRule(None, False, 5e6)}, [ZSTD, INT8])
    assert slow.choose(FAR, None) is CodecId.ZSTD_PLANES
    undeclared = CodecChoice({FAR: CodecRule(None, False, None)}, [ZSTD, INT8])
    assert undeclared.choose(FAR, None) is CodecId.RAW
    assert undeclared.choose(FAR, delivered(5e6)) is CodecId.ZSTD_PLANES
    assert undeclared.num_chosen == {"RAW": 1, "ZSTD_PLANES": 1}
    fast = CodecChoice({FAR: CodecRule(None, False, 5e6)}, [ZSTD, INT8])
    assert fast.choose(FAR, delivered(1.2e9)) is CodecId.RAW


def test_goodput_is_read_as_what_the_codec_in_use_delivered() -> None:
    """110 MB/s raw are worth coding at half a thread; 110 MB/s that were coded mean a link of 76 MB/s; 160 mean the codec is the limit."""
    choice, link = CodecChoice({FAR: CodecRule(None, False, None)}, [ZSTD]), Link()
    assert choice.choose(FAR, link.delivered(110e6)) is CodecId.ZSTD_PLANES
    assert choice.choose(FAR, link.delivered(110e6, 1.45)) is CodecId.ZSTD_PLANES
    assert choice.choose(FAR, link.delivered(160e6, 1.45)) is CodecId.RAW
    assert choice.choose(FAR, link.delivered(160e6)) is CodecId.RAW, "raw now, and too fast a link for half a thread"


def test_a_codec_that_does_nothing_for_what_is_really_sent_is_left_and_not_soon_tried_again() -> None:
    choice, link = CodecChoice({FAR: CodecRule(None, False, 5e6)}, [ZSTD]), Link()
    assert choice.choose(FAR, None) is CodecId.ZSTD_PLANES
    assert choice.choose(FAR, link.delivered(5.1e6, 1.02)) is CodecId.RAW
    later = [choice.choose(FAR, link.delivered(5e6)) for _ in range(70)]
    assert set(later[:60]) == {CodecId.RAW}
    assert CodecId.ZSTD_PLANES in later[60:], "other KV may be sent by then"


def test_what_went_raw_before_says_nothing_of_the_codec_that_follows() -> None:
    """The rates are still those of the raw KV when the next push asks."""
    choice, link = CodecChoice({FAR: CodecRule(None, False, None)}, [ZSTD]), Link()
    assert choice.choose(FAR, link.delivered(5e6)) is CodecId.ZSTD_PLANES
    for _ in range(3):
        assert choice.choose(FAR, link.delivered(5e6, 1.0, num_bytes=1000)) is CodecId.ZSTD_PLANES
    assert choice.choose(FAR, link.delivered(7e6, 1.4)) is CodecId.ZSTD_PLANES
    assert choice.choose(FAR, link.delivered(5e6, 1.0, num_bytes=64 << 20)) is CodecId.RAW


def test_bfloat16_is_coded_on_30_mbit_and_raw_on_loopback() -> None:
    """With this machine's codecs as measured here."""
    speeds = measure_codecs(KVSpec.gqa(30, 3, 64, "bfloat16"))
    config = launch_config("m", rate_mbit_s=30.0)
    rules = codec_rules(config, plan_topology(config), "a")
    (far,) = rules
    choice = CodecChoice(rules, speeds)
    link = Link()
    assert choice.choose(far, None) is CodecId.ZSTD_PLANES
    assert choice.choose(far, link.delivered(3.7e6 * 1.45, 1.45)) is CodecId.ZSTD_PLANES
    assert choice.choose(far, link.delivered(2e9)) is CodecId.RAW
    relay = plan_topology(config).worker("relay-0").route("a").kv
    assert choice.choose((relay.host, relay.port), None) is CodecId.RAW, "within the site"


def test_lossy_needs_the_rule_and_a_name_decides_alone() -> None:
    assert CodecChoice({FAR: CodecRule(None, False, 5e6)}, [ZSTD, INT8]).choose(FAR, None) is CodecId.ZSTD_PLANES
    assert CodecChoice({FAR: CodecRule(None, True, 5e6)}, [ZSTD, INT8]).choose(FAR, None) is CodecId.INT8_BLOCKS
    assert CodecChoice({FAR: CodecRule(CodecId.FP8_BLOCKS, True, 5e6)}, ()).choose(FAR, delivered(9e9)) is CodecId.FP8_BLOCKS
    assert CodecChoice({FAR: CodecRule(CodecId.RAW, True, 5e6)}, [ZSTD]).choose(FAR, None) is CodecId.RAW


@dataclass
class AnyReceiver(Mapping[tuple[str, int], CodecRule]):
    """One rule for every receiver: in-process workers choose their ports late."""

    rule: CodecRule

    def __getitem__(self, _: tuple[str, int]) -> CodecRule:
        return self.rule

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(())

    def __len__(self) -> int:
        return 0


async def test_a_worker_s_kv_is_coded_and_the_receiver_decodes_the_same_tokens() -> None:
    choice = CodecChoice(AnyReceiver(CodecRule(None, False, 1e6)), [CodecSpeed(CodecId.ZSTD_PLANES, True, 2.0, 1e9, 1e9)])
    async with WorkerHarness("prefill", FakeEngine, codecs=choice) as prefill, WorkerHarness("main", FakeEngine) as main:
        for number in range(2):
            prompt = list(range(40 + number, 120 + number))
            stream = main.attach().open(f"r-{number}", prompt, transfer=True, max_tokens=4, tenant=str(number))
            target = main.target((await stream.until("reserved")).reserved)
            sender = prefill.attach().open(f"r-{number}", prompt, decode=False, push_to=[target])
            pushed = (await sender.until("pushed")).pushed
            assert (pushed.bytes, pushed.codec) == (79 * KV_SPEC.bytes_per_token, "ZSTD_PLANES")
            complete = (await stream.until("kv_complete")).kv_complete
            assert (complete.received_bytes, complete.received_wire_bytes) == (pushed.bytes, pushed.wire_bytes)
            assert pushed.wire_bytes < 0.9 * pushed.bytes
            assert await stream.tokens(4) == expected_log(prompt, 4)
            await sender.half_close()
            await stream.half_close()
        ledger = await prefill.ledger()
        assert ledger.kv_codecs == {"ZSTD_PLANES": 2}
        assert ledger.kv_bytes_sent == 2 * 79 * KV_SPEC.bytes_per_token
        assert ledger.kv_coding_ratio == ledger.kv_bytes_sent / ledger.kv_wire_bytes_sent > 1.1
        info = await prefill.stub.Info(worker_pb2.InfoRequest())
        (link,) = info.links
        assert (link.receiver, link.link, link.codec, link.queued_bytes, link.num_transfers) == ("main", "tcp", "ZSTD_PLANES", 0, 0)
        assert (link.kv_bytes, link.kv_wire_bytes) == (ledger.kv_bytes_sent, ledger.kv_wire_bytes_sent)
        assert link.goodput_bytes_s > link.wire_bytes_s > 0
        assert 0 < link.round_trip_s < 5
        assert link.num_connections >= 1
        received = await main.ledger()
        assert (received.kv_bytes_received, received.kv_wire_bytes_received) == (ledger.kv_bytes_sent, ledger.kv_wire_bytes_sent)


async def test_a_lossy_payload_is_refused_by_a_receiver_that_takes_none() -> None:
    choice = CodecChoice(AnyReceiver(CodecRule(CodecId.INT8_BLOCKS, True, None)), ())
    async with WorkerHarness("prefill", FakeEngine, codecs=choice) as prefill, WorkerHarness("main", FakeEngine) as main:
        prompt = list(range(40, 80))
        stream = main.attach().open("r", prompt, transfer=True, max_tokens=4)
        target = main.target((await stream.until("reserved")).reserved)
        sender = prefill.attach().open("r", prompt, decode=False, push_to=[target])
        failed = (await sender.until("failed")).failed
        assert (failed.code, failed.target) == ("INVALID_ARGUMENT", target.target)
        assert "INT8_BLOCKS" in failed.message
        await sender.half_close()
        await stream.half_close()


def test_codecs_are_measured_in_the_model_s_own_shape_and_dtype() -> None:
    speeds = {speed.codec_id: speed for speed in measure_codecs(KVSpec.gqa(30, 3, 64, "bfloat16"))}
    assert set(speeds) == {CodecId.ZSTD_PLANES, CodecId.INT8_BLOCKS, CodecId.FP8_BLOCKS}
    assert 1.3 < speeds[CodecId.ZSTD_PLANES].ratio < 1.6
    assert speeds[CodecId.INT8_BLOCKS].ratio == pytest.approx(2 * 32 / 34)
    assert all(0 < speed.encode_bytes_s < math.inf for speed in speeds.values())
    narrow = {speed.codec_id: speed for speed in measure_codecs(KVSpec.gqa(2, 2, 8, "float8_e4m3fn"))}
    assert narrow[CodecId.INT8_BLOCKS].ratio == 1.0, "declined: never chosen"
