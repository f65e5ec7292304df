"""The worker service over real gRPC and the real KV link, with the in-test engine: however a request ends, every page comes back."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pddbridge.engine import Step
from pddbridge.sampling_params import SamplingParams
from tests.support.fake_engine import FakeEngine, expected_log
from tests.support.worker_harness import Attached, Gate, WorkerHarness, status_of

PROMPT = list(range(40, 63))


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
