"""Workers join and leave a running deployment under load: no request fails, none is wrong, nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from pdd.cli import app
from pdd.conform.single_run import single_engine_runs
from pdd.launch.fleet import Fleet, FleetError
from pdd.launch.fleet_server import FleetServer
from pdd.launch.local import Deployment
from pdd.roles import Role
from pddbridge.sampling_params import SamplingParams
from tests.support.clients import Streamed, body_of, complete
from tests.support.deployments import assert_idle, launch_config, worker_address

pytestmark = pytest.mark.system

PARAMS = SamplingParams(seed=1, max_tokens=40, temperature=0.0, ignore_eos=True)
PROMPTS = [list(range(20 + i, 90 + 3 * i)) for i in range(3)]


class Load:
    """Requests one after another from ``clients`` clients, until told to stop."""

    def __init__(self, deployment: Deployment, model: str, clients: int = 2) -> None:
        self.answers: list[tuple[int, Streamed]] = []
        self._url, self._model, self._clients = deployment.http_url, model, clients
        self._stopping = threading.Event()

    async def _client(self, number: int) -> None:
        async with httpx.AsyncClient(timeout=120.0) as client:
            count = 0
            while not self._stopping.is_set():
                which = (number + count) % len(PROMPTS)
                pipeline = ("relay", "direct")[count % 2]
                body = {**body_of(self._model, PROMPTS[which], PARAMS, pipeline=pipeline), "cache_salt": f"{number}-{count // 4}"}
                self.answers.append((which, await complete(client, self._url, body)))
                count += 1

    async def _run(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(self._clients)))

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            thread.join(120.0)

    def check(self, expected: list[list[int]]) -> None:
        assert self.answers
        for which, answer in self.answers:
            assert answer.error is None
            assert answer.ids == expected[which]
            assert answer.finish_reasons == ["length"]
            assert answer.done


def scale_under_load(model: Path, cache_dir: Path, steps: list[tuple[Role, int]]) -> None:
    with Deployment(launch_config(str(model), engines=("torch", "torch", "torch")), cache_dir) as deployment:
        deployment.start()
        fleet = Fleet(deployment)
        expected = single_engine_runs(worker_address(deployment, "prefill-0"), [(prompt, PARAMS) for prompt in PROMPTS])
        load = Load(deployment, str(model))
        used: set[str] = set()
        with load.running():
            for role, count in steps:
                fleet.scale(role, count)
                assert len(fleet.names(role)) == count
                states = fleet.states()
                assert sorted(str(s["name"]) for s in states if s["role"] == role) == sorted(fleet.names(role))
                assert all(s["state"] == "ready" for s in states), states
                before = len(load.answers)
                while len(load.answers) < before + 6:
                    threading.Event().wait(0.05)
                metrics = httpx.get(f"{deployment.http_url}/metrics", timeout=10).text
                used |= {s["name"] for s in states if f'pdd:worker_last_answer_seconds{{worker="{s["name"]}"}}' in metrics}  # type: ignore[misc]
        load.check(expected)
        assert len(used) == 3 + sum(count - 1 for _, count in steps if count > 1)
        assert set(deployment.processes) == {"link", "coordinator", "prefill-0", "relay-0", "main-0"}
        assert_idle(deployment, within_s=5.0)


def test_main_scales_from_one_to_two_and_back_under_load(tiny_model: Path, cache_dir: Path) -> None:
    scale_under_load(tiny_model, cache_dir, [("main", 2), ("main", 1)])


@pytest.mark.slow
def test_each_role_scales_from_one_to_three_and_back_under_load(tiny_model: Path, cache_dir: Path) -> None:
    roles: tuple[Role, ...] = ("prefill", "relay", "main")
    scale_under_load(tiny_model, cache_dir, [(role, count) for role in roles for count in (3, 1)])


@pytest.mark.slow
def test_the_operator_lists_adds_and_drains_from_another_terminal(tiny_model: Path, cache_dir: Path) -> None:
    with Deployment(launch_config(str(tiny_model), engines=("torch", "torch", "torch")), cache_dir) as deployment:
        deployment.start()
        with FleetServer(Fleet(deployment), "127.0.0.1", None) as server:

            def pdd(*arguments: str) -> tuple[int, str]:
                result = CliRunner().invoke(app, ["workers", *arguments, "--admin", str(server.at)], env={"COLUMNS": "200"})
                return result.exit_code, result.output + (result.stderr if result.stderr_bytes else "")

            assert pdd("list")[0] == 0
            status, said = pdd("add", "main")
            assert status == 0, said
            assert "main-1" in said
            status, said = pdd("drain", "main-0")
            assert status == 0, said
            assert "main-0" not in said
            status, said = pdd("drain", "main-1")
            assert status == 1
            assert "last worker for main" in said
            status, said = pdd("add", "cook")
            assert status == 1
            assert "'cook'" in said
        with pytest.raises(FleetError, match="no-such"):
            Fleet(deployment).drain(["no-such"])
        assert_idle(deployment)
