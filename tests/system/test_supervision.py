"""A worker that is killed does not end the service: the request goes on, and the launcher starts the worker again on its ports."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from itertools import count
from pathlib import Path

import httpx
import pytest

from pdd.conform.single_run import single_engine_runs
from pdd.launch.local import Deployment
from pdd.launch.process import ChildEvent
from pdd.launch.supervise import Supervisor
from pddbridge.sampling_params import SamplingParams
from tests.support.clients import Streamed, body_of, complete, complete_all
from tests.support.deployments import assert_idle, launch_config, worker_address

pytestmark = pytest.mark.system

PARAMS = SamplingParams(seed=1, max_tokens=200, temperature=0.0, ignore_eos=True)
PROMPT = list(range(20, 90))


def healthy(deployment: Deployment) -> bool:
    return httpx.get(f"{deployment.http_url}/health", timeout=10).status_code == 200


def wait_until(what: bool, deployment: Deployment, within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while healthy(deployment) is not what:
        assert time.monotonic() < deadline_s, f"/health is not {what} after {within_s} s"
        time.sleep(0.1)


async def stream_while_killing(deployment: Deployment, body: dict[str, object], victim: str) -> Streamed:
    """Start the stream, kill the victim while it is under way."""
    async with httpx.AsyncClient(timeout=60.0) as client:
        running = asyncio.create_task(complete(client, deployment.http_url, body))
        await asyncio.sleep(0.3)
        os.kill(deployment.processes[victim].pid, signal.SIGKILL)
        return await running


@pytest.mark.parametrize("victim", ["relay-0", "main-0"])
def test_a_killed_worker_is_started_again_while_the_service_goes_on(victim: str, tiny_model: Path, cache_dir: Path):
    said: list[str] = []
    with Deployment(launch_config(str(tiny_model), engines=("torch", "torch", "torch")), cache_dir) as deployment:
        deployment.start()
        supervisor = Supervisor(deployment, said.append)
        expected = single_engine_runs(worker_address(deployment, "prefill-0"), [(PROMPT, PARAMS)])[0]
        # The relay may make no more than 100 tokens, so the request is still alive when either is killed or goes on by itself.
        body = {**body_of(str(tiny_model), PROMPT, PARAMS, pipeline="relay", handoff_at=100), "cache_salt": "killed"}
        answer = asyncio.run(stream_while_killing(deployment, body, victim))
        assert answer.error is None
        assert answer.ids == expected
        ended = deployment.first_exit(timeout_s=10)
        assert ended is not None
        assert ended.name == victim
        assert supervisor.react(ended)
        assert "SIGKILL" in said[0]
        wait_until(True, deployment, within_s=60)
        # A relay that was done before it was killed is missed at the next look at it, so the first may come without one.
        deadline_s = time.monotonic() + 30
        for number in count():
            (again,) = complete_all(deployment.http_url, [{**body, "cache_salt": f"again-{number}"}])
            assert again.ids == expected
            if again.origins == ["relay"] * 100 + ["main"] * 100:
                break
            assert time.monotonic() < deadline_s, f"{victim} is not used again: {again.origins.count('relay')} tokens by the relay"
        assert again.number("fallbacks") == 0
        assert_idle(deployment)


def test_restarts_wait_longer_each_time_and_are_bounded(tiny_model: Path, cache_dir: Path):
    """A worker that cannot stay up is given up alone; the coordinator and the link take the service with them."""
    now = 0.0
    started: list[tuple[str, float]] = []
    said: list[str] = []
    restarts = {"most": 3, "window_s": 100.0, "first_s": 2.0, "longest_s": 3.0}
    deployment = Deployment(launch_config(str(tiny_model), survival={"restarts": restarts}), cache_dir)
    deployment.wanted = lambda name: True  # type: ignore[method-assign]
    deployment.restart = lambda name: started.append((name, now))  # type: ignore[method-assign]
    supervisor = Supervisor(deployment, said.append, clock=lambda: now)
    for name, goes_on in (("relay-0", True), ("coordinator", False), ("link", False)):
        started.clear()
        now += 1000.0
        begin = now
        for _ in range(3):
            assert supervisor.react(ChildEvent(name, "exited", {"status": -9}))
            while (name, now) not in started:
                now += 0.5
                supervisor.tick()
            now += 0.5
        assert [at - begin for _, at in started] == [0.0, 2.5, 6.0]
        assert supervisor.react(ChildEvent(name, "exited", {"status": 1})) is goes_on
        assert "after 3 restarts" in said[-1]
        now += 200.0
        assert supervisor.react(ChildEvent(name, "exited", {"status": 1})), "the window is over"
    deployment.stop()
