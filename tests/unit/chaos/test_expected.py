"""The worker that says what is right is asked again when a call to it is lost, and only then."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from pdd.chaos.expected import ATTEMPTS, again_when_lost

NOTHING = grpc.aio.Metadata()


class Worker:
    def __init__(self, times: int, code: grpc.StatusCode) -> None:
        self.asked = 0
        self._times, self._code = times, code

    async def run(self) -> list[int]:
        self.asked += 1
        if self.asked <= self._times:
            raise grpc.aio.AioRpcError(self._code, NOTHING, NOTHING, details="ping timeout")
        return [1, 2]


async def test_lost_calls_are_made_again_a_few_times() -> None:
    worker = Worker(ATTEMPTS - 1, grpc.StatusCode.UNAVAILABLE)
    assert await again_when_lost(worker.run) == [1, 2]
    assert worker.asked == ATTEMPTS


@pytest.mark.parametrize(("code", "asked"), [(grpc.StatusCode.UNAVAILABLE, ATTEMPTS), (grpc.StatusCode.INTERNAL, 1)])
async def test_what_stays_lost_or_fails_otherwise_is_raised(code: grpc.StatusCode, asked: int) -> None:
    worker = Worker(ATTEMPTS, code)
    with pytest.raises(grpc.aio.AioRpcError):
        await again_when_lost(worker.run)
    assert worker.asked == asked
