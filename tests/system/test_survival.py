"""Processes that are stopped or killed under a running request: it goes on elsewhere or ends with an error, within a bound."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pdd.conform.single_run import single_engine_runs
from pdd.launch.local import Deployment
from pdd.launch.supervise import Supervisor
from pddbridge.sampling_params import SamplingParams
from tests.support.clients import Streamed, body_of, complete, complete_all
from tests.support.deployments import assert_idle, launch_config, worker_address

pytestmark = pytest.mark.system

PARAMS = SamplingParams(seed=1, max_tokens=430, temperature=0.0, ignore_eos=True)
PROMPT = list(range(20, 90))
# Keep-alive of a connection notices a stopped process after 5 s, the watch after 10 s.
NOTICED_WITHIN_S = 15.0


@pytest.fixture(scope="module")
def two_mains(tiny_model: Path, cache_dir: Path) -> Iterator[tuple[Deployment, Supervisor, list[str]]]:
    survival = {"restarts": {"unresponsive_s": 12.0}, "lost_after_s": 6.0, "answer_timeout_s": 2.0}
    config = launch_config(str(tiny_model), engines=("torch", "torch", "torch"), mains=2, survival=survival, policy={"pipeline": "direct"})
    said: list[str] = []
    with Deployment(config, cache_dir) as deployment:
        deployment.start()
        yield deployment, Supervisor(deployment, said.append), said


async def stream_and(deployment: Deployment, body: dict[str, object], victim: str, number: signal.Signals) -> Streamed:
    """Start the stream; when its first tokens come, send ``number`` to the victim."""

    async def strike(response: httpx.Response) -> None:
        assert response.status_code == 200
        os.kill(deployment.processes[victim].pid, number)

    async with httpx.AsyncClient(timeout=90.0, event_hooks={"response": [strike]}) as client:
        return await complete(client, deployment.http_url, body)


def supervise_until(supervisor: Supervisor, deployment: Deployment, done: object, within_s: float) -> None:
    """Supervise by hand until ``done()``."""
    deadline_s = time.monotonic() + within_s
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, f"not within {within_s} s"
        ended = deployment.first_exit(0.1)
        assert ended is None or supervisor.react(ended)
        supervisor.tick()


def answers(deployment: Deployment) -> bool:
    try:
        return httpx.get(f"{deployment.http_url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_main_that_is_stopped_loses_its_request_to_another_and_is_replaced(
    two_mains: tuple[Deployment, Supervisor, list[str]], tiny_model: Path
) -> None:
    deployment, supervisor, said = two_mains
    expected = single_engine_runs(worker_address(deployment, "prefill-0"), [(PROMPT, PARAMS)])[0]
    body = {**body_of(str(tiny_model), PROMPT, PARAMS), "cache_salt": "stopped"}

    victim = "main-0"  # by name, where nothing speaks against it
    answer = asyncio.run(stream_and(deployment, body, victim, signal.SIGSTOP))
    assert answer.error is None
    assert answer.ids == expected
    assert answer.number("fallbacks") == 1
    assert answer.number("max_itl_s") < NOTICED_WITHIN_S
    assert answers(deployment), "another main is there"
    pid = deployment.processes[victim].pid
    supervise_until(supervisor, deployment, lambda: deployment.processes[victim].pid != pid, 30.0)
    assert any(victim in line and "not been heard of" in line for line in said)
    supervise_until(supervisor, deployment, lambda: deployment.processes[victim].heard_s is not None, 60.0)
    (again,) = complete_all(deployment.http_url, [{**body, "cache_salt": "again"}])
    assert again.ids == expected
    assert_idle(deployment, within_s=10.0)


def test_a_killed_coordinator_is_started_again_over_the_same_workers(
    two_mains: tuple[Deployment, Supervisor, list[str]], tiny_model: Path
) -> None:
    """What was in flight breaks off where a client cannot take it for an end; workers let go of it; the same port serves again."""
    deployment, supervisor, said = two_mains
    pids = {name: child.pid for name, child in deployment.processes.items()}
    body = {**body_of(str(tiny_model), PROMPT, PARAMS), "cache_salt": "killed"}
    with pytest.raises(httpx.HTTPError):
        asyncio.run(stream_and(deployment, body, "coordinator", signal.SIGKILL))
    assert_idle(deployment, within_s=8.0)
    began_s = time.monotonic()
    supervise_until(supervisor, deployment, lambda: answers(deployment), 40.0)
    print(f"serving again after {time.monotonic() - began_s:.1f} s")
    assert any("coordinator was killed by SIGKILL" in line for line in said)
    assert {name: child.pid for name, child in deployment.processes.items() if name != "coordinator"} == {
        name: pid for name, pid in pids.items() if name != "coordinator"
    }
    (again,) = complete_all(deployment.http_url, [{**body, "cache_salt": "again"}])
    assert again.finish_reasons == ["length"]
    assert len(again.ids) == PARAMS.max_tokens
    assert again.number("fallbacks") == 0
    assert_idle(deployment)
