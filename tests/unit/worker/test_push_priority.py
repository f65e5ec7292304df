"""A push's class changes while it runs, by the coordinator's command; what makes no sense ends the request, what came too late does not."""

from __future__ import annotations

import pytest

from pdd.worker.transfers import Push
from pddbridge.link_schedule import Priority
from pddbridge.rpc.gen import worker_pb2 as pb
from tests.support.fake_engine import FakeEngine
from tests.support.worker_harness import WorkerHarness

PROMPT = list(range(1, 24))


def command(target: str, priority: int) -> pb.WorkerCommand:
    made = pb.WorkerCommand(set_priority=pb.SetPriority(target=target))
    made.set_priority.priority = priority  # type: ignore[assignment]
    return made


async def test_a_running_push_gets_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[Priority] = []
    original = Push.set_priority

    def recorded(push: Push, priority: Priority) -> None:
        original(push, priority)
        set_to.append(priority)

    monkeypatch.setattr(Push, "set_priority", recorded)
    async with WorkerHarness("p", FakeEngine) as prefill, WorkerHarness("main", FakeEngine) as main:
        on_main = main.attach().open("r", PROMPT, transfer=True, decode=False)
        reserved = (await on_main.until("reserved")).reserved
        sender = prefill.attach().open("r", PROMPT, decode=False, push_to=[main.target(reserved)])
        sender.send(command("main", pb.TRANSFER_PRIORITY_BACKGROUND))
        sender.send(command("main", pb.TRANSFER_PRIORITY_URGENT))
        sender.send(command("nobody", pb.TRANSFER_PRIORITY_NORMAL))
        await sender.until("pushed")
        await on_main.until("kv_complete")
        sender.send(command("main", pb.TRANSFER_PRIORITY_NORMAL))  # too late, and no harm
        for stream in (sender, on_main):
            await stream.half_close()
        assert set_to[:2] == [Priority.BACKGROUND, Priority.URGENT]


async def test_a_class_that_is_not_known_ends_the_request() -> None:
    async with WorkerHarness("p", FakeEngine) as prefill:
        stream = prefill.attach().open("r", PROMPT, max_tokens=100)
        stream.send(command("main", 9))
        failed = (await stream.until_failed()).failed
        assert (failed.code, failed.target) == ("INVALID_ARGUMENT", "")
        assert "set_priority.priority: given 9" in failed.message
        await stream.half_close()
