"""The worker service over real gRPC and the real KV link, with the in-test engine: cases 7, 8, 20, 25, 41 and 78 at the worker's edge."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import grpc
import pytest

from pdd.worker import messages as m
from pdd.worker.executor import ExecutorLimits
from pddbridge.engine import Step
from pddbridge.rpc.gen import worker_pb2
from pddbridge.sampling_params import SamplingParams
from tests.support.fake_engine import KV_SPEC, FakeEngine, expected_log
from tests.support.worker_harness import Attached, WorkerHarness

PROMPT = list(range(40, 63))
BYTES = KV_SPEC.bytes_per_token


class Gate:
    """Holds the step thread before a step until it is opened; ``reached`` tells that it stands there."""

    def __init__(self, opened: bool = False) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        if opened:
            self._open.set()

    def __call__(self, step: Step) -> None:
        self.reached.set()
        assert self._open.wait(10), "the gate was never opened"

    def close(self) -> None:
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def until_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, 10)


async def status_of(stream: Attached) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.next()
    code: grpc.StatusCode = caught.value.code()
    return code


async def relay_and_main(prompt: Sequence[int], prefill: WorkerHarness, receivers: Sequence[WorkerHarness]) -> list[Attached]:
    """Reserve at the receivers, prefill with pushes to those that lack something; all streams, prefill's last."""
    streams = [r.attach().open("r", prompt, transfer=True, decode=False, max_tokens=12) for r in receivers]
    reserved = [(await stream.until("reserved")).reserved for stream in streams]
    targets = [worker.target(r) for worker, r in zip(receivers, reserved, strict=True) if r.transfer_id]
    sender = prefill.attach().open("r", prompt, decode=False, push_to=targets)
    for _ in targets:
        await sender.until("pushed")
    for stream in streams:
        await stream.until("kv_complete")
    return [*streams, sender]


async def test_info_tells_what_a_coordinator_compares() -> None:
    async with WorkerHarness("w", FakeEngine) as worker:
        info = await worker.stub.Info(worker_pb2.InfoRequest())
        assert (info.name, info.engine, info.ready, info.page_size, info.num_pages) == ("w", "fake", True, 8, 16)
        assert (info.max_context_tokens, info.vocab_size, info.kv_bytes_per_token, info.kv_dtype) == (100, 300, BYTES, "float32")
        assert info.epoch == worker.service.epoch != 0
        assert len(info.fingerprint) == 64


async def test_one_worker_computes_and_decodes() -> None:
    async with WorkerHarness("w", FakeEngine) as worker:
        stream = worker.attach().open("r", PROMPT)
        assert await stream.tokens(8) == expected_log(PROMPT, 8)
        assert stream.kinds()[:2] == ["reserved", "prefilled"]
        positions = [event.tokens.position for event in stream.seen if event.WhichOneof("event") == "tokens"]
        assert positions == list(range(8))
        await stream.half_close()


@pytest.mark.parametrize("length", [1, 2, 8, 9, 16, 17, 23])
async def test_prefill_relay_and_main_give_the_single_engine_run(length: int) -> None:
    prompt = PROMPT[:length]
    async with (
        WorkerHarness("p", lambda: FakeEngine(page_size=12)) as prefill,
        WorkerHarness("relay", lambda: FakeEngine(page_size=5)) as relay,
        WorkerHarness("main", lambda: FakeEngine(page_size=8)) as main,
    ):
        on_relay, on_main, on_prefill = await relay_and_main(prompt, prefill, [relay, main])
        log = expected_log(prompt, 12)
        on_relay.ingest(0, [], decode=True)
        relayed = await on_relay.tokens(3)
        on_relay.seal()
        sealed = (await on_relay.until("sealed")).sealed.length
        relayed = on_relay.ids()
        assert len(relayed) == sealed
        on_main.ingest(0, relayed, decode=True)
        rest = await on_main.tokens(12 - sealed)
        assert relayed + rest == log
        for stream in (on_relay, on_main, on_prefill):
            await stream.half_close()
        for worker in (relay, main):
            ledger = await worker.assert_idle()
            assert (ledger.kv_bytes_received, ledger.computed_prompt_tokens) == ((length - 1) * BYTES, 0)
        sent = await prefill.assert_idle()
        assert (sent.kv_bytes_sent, sent.computed_prompt_tokens) == (2 * (length - 1) * BYTES, length - 1)


@pytest.mark.parametrize("primed", [0, 11, 16, 22, 23])
async def test_only_the_missing_suffix_travels(primed: int) -> None:
    async with WorkerHarness("p", FakeEngine) as prefill, WorkerHarness("main", lambda: FakeEngine(page_size=12)) as main:
        if primed:
            earlier = main.attach().open("earlier", [*PROMPT[:primed], *[7] * 13], max_tokens=1)
            await earlier.tokens(1)
            await earlier.half_close()
        before = await main.assert_idle()
        on_main, on_prefill = await relay_and_main(PROMPT, prefill, [main])
        on_main.ingest(0, [], decode=True)
        assert await on_main.tokens(12) == expected_log(PROMPT, 12)
        missing = 22 - min(primed, 22)
        complete = next(event.kv_complete for event in on_main.seen if event.WhichOneof("event") == "kv_complete")
        assert (complete.received_tokens, complete.received_bytes) == (missing, missing * BYTES)
        pushed = [event.pushed for event in on_prefill.seen if event.WhichOneof("event") == "pushed"]
        assert [(p.target, p.tokens, p.bytes) for p in pushed] == ([("main", missing, missing * BYTES)] if missing else [])
        for stream in (on_main, on_prefill):
            await stream.half_close()
        ledger = await main.assert_idle()
        assert ledger.kv_bytes_received == missing * BYTES
        assert ledger.computed_prompt_tokens == before.computed_prompt_tokens
        assert (await prefill.assert_idle()).kv_bytes_sent == missing * BYTES


async def test_a_target_that_lacks_nothing_is_told_pushed_at_once() -> None:
    async with WorkerHarness("p", FakeEngine) as prefill:
        nothing = worker_pb2.PushTarget(target="main", first_token=22)
        stream = prefill.attach().open("r", PROMPT, decode=False, push_to=[nothing])
        pushed = (await stream.until("pushed")).pushed
        assert (pushed.target, pushed.tokens, pushed.bytes) == ("main", 0, 0)
        await stream.half_close()


async def test_a_small_window_moves_a_long_prompt_piece_by_piece() -> None:
    prompt = [(7 * i) % 290 for i in range(90)]
    limits = ExecutorLimits(push_window_bytes=4 * BYTES, push_piece_bytes=3 * BYTES)
    async with WorkerHarness("p", FakeEngine, limits=limits) as prefill, WorkerHarness("main", lambda: FakeEngine(page_size=12)) as main:
        on_main, on_prefill = await relay_and_main(prompt, prefill, [main])
        on_main.ingest(0, [], decode=True)
        assert await on_main.tokens(8) == expected_log(prompt, 8)
        for stream in (on_main, on_prefill):
            await stream.half_close()


async def test_a_failed_push_is_told_and_the_other_target_still_gets_its_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    async with WorkerHarness("p", FakeEngine) as prefill, WorkerHarness("main", FakeEngine) as main:
        posted: list[m.Command] = []
        post = prefill.step_loop.post
        monkeypatch.setattr(prefill.step_loop, "post", lambda command: (posted.append(command), post(command)))
        on_main = main.attach().open("r", PROMPT, transfer=True)
        good = main.target((await on_main.until("reserved")).reserved)
        bad = worker_pb2.PushTarget(target="gone", host="127.0.0.1", port=main.kv_port, epoch=good.epoch, transfer_id=999, first_token=0)
        on_prefill = prefill.attach().open("r", PROMPT, decode=False, push_to=[bad, good])
        events = [await on_prefill.next() for _ in range(4)]
        failed = [event.failed for event in events if event.WhichOneof("event") == "failed"]
        assert [(f.target, f.code) for f in failed] == [("gone", "NOT_FOUND")]
        assert m.PushEnded("r", "gone") in posted  # nothing more is read for it
        assert sorted(str(kind) for kind in on_prefill.kinds()) == ["failed", "prefilled", "pushed", "reserved"]
        assert await on_main.tokens(8) == expected_log(PROMPT, 8)
        for stream in (on_main, on_prefill):
            await stream.half_close()
        assert (await main.ledger()).late_frames_dropped > 0


async def test_models_that_differ_refuse_each_other() -> None:
    async with (
        WorkerHarness("p", lambda: FakeEngine(weights="one")) as prefill,
        WorkerHarness("main", lambda: FakeEngine(weights="another")) as main,
    ):
        on_main = main.attach().open("r", PROMPT, transfer=True)
        target = main.target((await on_main.until("reserved")).reserved)
        on_prefill = prefill.attach().open("r", PROMPT, decode=False, push_to=[target])
        while (event := await on_prefill.next()).WhichOneof("event") != "failed":
            pass
        assert event.failed.target == "main"
        assert "fingerprint" in event.failed.message
        on_main.cancel()
        await on_prefill.half_close()
        assert (await main.assert_idle()).kv_bytes_received == 0


# Refused.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids: empty"),
        ({"prompt_ids": [-1]}, "prompt_ids[0]"),
        ({"prompt_ids": [5, 300]}, "prompt_ids[1]"),
        ({"prompt_ids": [2**31 - 1]}, "prompt_ids[0]"),
        ({"log_ids": [1, 300]}, "log_ids[1]"),
        ({"prompt_ids": [1] * 101}, "this worker's context is 100"),
        ({"prompt_ids": [1] * 60, "log_ids": [1] * 41}, "this worker's context is 100"),
        ({"request_id": ""}, "request_id"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"kv_source": 0}, "kv_source"),
        ({"push_to": [worker_pb2.PushTarget(target="a", first_token=3)]}, "push_to[0].first_token"),
        ({"prompt_ids": [1] * 9, "push_to": [worker_pb2.PushTarget(target="a", first_token=3)]}, "push_to[0].transfer_id"),
        ({"prompt_ids": [1] * 9, "push_to": [worker_pb2.PushTarget(target="a", transfer_id=1)]}, "push_to[0]: given host"),
    ],
)
async def test_bad_opens_are_refused_by_name(change: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"request_id": "r", "prompt_ids": [5, 6], "kv_source": 1, "timeout_s": 5.0}
    async with WorkerHarness("w", FakeEngine) as worker:
        stream = worker.attach()
        stream.send(worker_pb2.WorkerCommand(open=worker_pb2.Open(**{**fields, **change})))  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.next()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in (caught.value.details() or "")
        after = worker.attach().open("next", PROMPT)
        assert await after.tokens(8) == expected_log(PROMPT, 8)
        await after.half_close()


async def test_ids_out_of_range_in_the_handoff_fail_the_request() -> None:
    async with WorkerHarness("w", FakeEngine) as worker:
        for bad in (-1, 300, 2**31 - 1):
            stream = worker.attach().open("r", PROMPT, decode=False)
            await stream.until("prefilled")
            stream.ingest(0, [5, bad], decode=True)
            failed = (await stream.next()).failed
            assert failed.code == "INVALID_ARGUMENT"
            assert str(bad) in failed.message
            with pytest.raises(EOFError):
                await stream.next()
            await worker.assert_idle()


async def test_a_first_command_other_than_open_and_a_second_open_are_refused() -> None:
    async with WorkerHarness("w", FakeEngine) as worker:
        stream = worker.attach()
        stream.seal()
        assert await status_of(stream) is grpc.StatusCode.INVALID_ARGUMENT
        stream = worker.attach().open("r", PROMPT, decode=False)
        await stream.until("prefilled")
        stream.open("r2", PROMPT)
        assert (await stream.next()).failed.code == "INVALID_ARGUMENT"


async def test_a_request_id_in_use_is_refused_and_the_first_goes_on() -> None:
    gate = Gate()
    async with WorkerHarness("w", lambda: FakeEngine(before_step=gate)) as worker:
        stream = worker.attach().open("r", PROMPT)
        await gate.until_reached()
        assert await status_of(worker.attach().open("r", [1, 2, 3])) is grpc.StatusCode.INVALID_ARGUMENT
        gate.open()
        assert await stream.tokens(8) == expected_log(PROMPT, 8)
        await stream.half_close()


async def test_a_full_queue_is_resource_exhausted() -> None:
    async with WorkerHarness("w", lambda: FakeEngine(num_pages=4), limits=ExecutorLimits(max_waiting=1)) as worker:
        first = worker.attach().open("r0", PROMPT, decode=False)
        await first.until("prefilled")
        second = worker.attach().open("r1", PROMPT[::-1], decode=False)
        while (await worker.ledger()).num_requests < 2:
            await asyncio.sleep(0.01)
        assert await status_of(worker.attach().open("r2", [1, *PROMPT], decode=False)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await first.half_close()
        await second.until("prefilled")
        await second.half_close()


# Endings.


@pytest.mark.parametrize(
    "state", ["opened", "queued", "reserved", "prefilling", "prefilled", "receiving", "complete", "decoding", "sealed", "finished"]
)
@pytest.mark.parametrize("how", ["cancel", "half_close"])
async def test_ending_the_stream_in_every_state_returns_all_pages(state: str, how: str) -> None:
    gate = Gate(opened=state != "prefilling")
    engine = lambda: FakeEngine(num_pages=8, before_step=gate)  # noqa: E731
    async with WorkerHarness("p", FakeEngine) as prefill, WorkerHarness("w", engine) as worker:
        blocker, sender = None, None
        if state == "queued":
            blocker = worker.attach().open("blocker", [9] * 60, decode=False)
            await blocker.until("prefilled")
        transfer = state in ("reserved", "receiving", "complete")
        stream = worker.attach().open("r", PROMPT, transfer=transfer, decode=state in ("decoding", "sealed", "finished"), max_tokens=40)
        if state in ("receiving", "complete"):
            target = worker.target((await stream.until("reserved")).reserved)
            sender = prefill.attach().open("r", PROMPT, decode=False, push_to=[target])
        match state:
            case "queued":
                while (await worker.ledger()).num_requests < 2:
                    await asyncio.sleep(0.01)
            case "reserved":
                await stream.until("reserved")
            case "prefilling":
                await gate.until_reached()
            case "prefilled":
                await stream.until("prefilled")
            case "complete":
                await stream.until("kv_complete")
            case "decoding":
                await stream.tokens(3)
            case "sealed":
                await stream.tokens(3)
                stream.seal()
                await stream.until("sealed")
            case "finished":
                await stream.tokens(40)
        if how == "cancel":
            stream.cancel()
            stream.cancel()
        else:
            closing = asyncio.create_task(stream.half_close())
        gate.open()
        if how == "half_close":
            await closing
        if blocker is not None:
            await blocker.half_close()
        if sender is not None:
            sender.cancel()
        await worker.assert_idle()
        again = worker.attach().open("r", PROMPT)
        assert await again.tokens(8) == expected_log(PROMPT, 8)
        await again.half_close()


async def test_a_deadline_on_the_workers_own_clock_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with WorkerHarness("w", FakeEngine) as worker:
        fence, fenced = worker.traffic.fence, asyncio.Event()

        async def slow_fence(transfer_id: int) -> None:
            await asyncio.wait_for(fenced.wait(), 10)
            await fence(transfer_id)

        monkeypatch.setattr(worker.traffic, "fence", slow_fence)
        stream = worker.attach().open("r", PROMPT, transfer=True, timeout_s=0.1)
        await stream.until("reserved")
        failing = asyncio.create_task(stream.next())
        done, _ = await asyncio.wait((failing,), timeout=0.4)
        assert not done  # a failure is told only after all pages are back
        assert (await worker.ledger()).num_requests == 1
        fenced.set()
        failed = (await failing).failed
        assert (failed.code, failed.target) == ("DEADLINE_EXCEEDED", "")
        ledger = await worker.ledger()
        assert (ledger.pinned_pages, ledger.num_requests, ledger.num_incoming_transfers) == (0, 0, 0)
        with pytest.raises(EOFError):
            await stream.next()


async def test_a_failing_step_fails_the_request_and_the_worker_goes_on() -> None:
    def broken(step: Step) -> None:
        if 250 in step.token_ids:
            raise RuntimeError("device on fire")

    async with WorkerHarness("w", lambda: FakeEngine(before_step=broken)) as worker:
        stream = worker.attach().open("bad", [250, *PROMPT])
        await stream.until("reserved")
        failed = (await stream.next()).failed
        assert failed.code == "INTERNAL"
        assert "device on fire" in failed.message
        good = worker.attach().open("good", PROMPT)
        assert await good.tokens(8) == expected_log(PROMPT, 8)
        await good.half_close()


@pytest.mark.parametrize("link", ["tcp", "shm"])
async def test_late_frames_of_a_cancelled_request_do_not_touch_the_next_owner(link: str) -> None:
    """The receiver goes away while its sender is still at it; the pages get another owner at once."""
    gate = Gate()
    async with (
        WorkerHarness("p", lambda: FakeEngine(before_step=gate)) as prefill,
        WorkerHarness("w", lambda: FakeEngine(num_pages=4)) as w,
    ):
        stream = w.attach().open("r", PROMPT, transfer=True)
        target = w.target((await stream.until("reserved")).reserved)
        target.link = link
        sender = prefill.attach().open("r", PROMPT, decode=False, push_to=[target])
        await gate.until_reached()
        stream.cancel()
        await w.assert_idle()
        other = w.attach().open("other", PROMPT[::-1], max_tokens=4)
        gate.open()
        failed = (await sender.until_failed()).failed
        assert (failed.target, failed.code) in {("w", "CANCELLED"), ("w", "NOT_FOUND")}
        assert await other.tokens(4) == expected_log(PROMPT[::-1], 4)
        await other.half_close()
        await sender.half_close()
        assert (await w.ledger()).late_frames_dropped > 0


async def test_concurrent_requests_do_not_disturb_one_another() -> None:
    prompts = [[(i * 13 + n * 7) % 290 for i in range(5 + 6 * n)] for n in range(6)]
    async with WorkerHarness("w", lambda: FakeEngine(num_pages=14, max_rows=3)) as worker:
        streams = [worker.attach().open(f"r{n}", prompt, max_tokens=10) for n, prompt in enumerate(prompts)]

        async def run(stream: Attached, prompt: list[int]) -> None:
            assert await stream.tokens(10) == expected_log(prompt, 10)
            await stream.half_close()

        await asyncio.gather(*(run(stream, prompt) for stream, prompt in zip(streams, prompts, strict=True)))


async def test_a_stop_token_ends_proposing_while_the_stream_stays() -> None:
    log = expected_log(PROMPT, 1)
    async with WorkerHarness("w", FakeEngine) as worker:
        params = SamplingParams(seed=1, max_tokens=9, temperature=0.0, eos_token_ids=frozenset({log[0]}))
        stream = worker.attach().open("r", PROMPT, params=params)
        assert await stream.tokens(1) == log
        stream.seal()
        assert (await stream.next()).sealed.length == 1
        await stream.half_close()


async def test_stopping_the_worker_tells_every_stream() -> None:
    async with WorkerHarness("w", FakeEngine) as worker:
        stream = worker.attach().open("r", PROMPT, transfer=True)
        await stream.until("reserved")
        await worker.service.end()
        assert (await stream.next()).failed.code == "UNAVAILABLE"
        assert await status_of(worker.attach().open("r2", PROMPT)) is grpc.StatusCode.UNAVAILABLE
        worker.service.begin(worker.runtime)
