"""Prefill, relay and main with the in-test engine, real gRPC and real KV links in this process, and a real coordinator before them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from pdd.config import LaunchConfig
from pdd.roles import Role
from pdd.serving.coordinator import Coordinator
from pdd.serving.metrics import Metrics
from pdd.serving.worker_pool import WorkerPool
from pdd.topology import Address, Route, Topology, WorkerPlace
from tests.support.fake_engine import FakeEngine
from tests.support.worker_harness import WorkerHarness

SITES: dict[Role, str] = {"prefill": "a", "relay": "a", "main": "b"}


@dataclass(frozen=True)
class SmallSystem:
    coordinator: Coordinator
    workers: dict[Role, WorkerHarness]
    engines: dict[Role, FakeEngine]
    other: Coordinator  # that sends to the same workers


@contextlib.asynccontextmanager
async def small_system(
    engines: dict[Role, FakeEngine], pipeline: str, flow: dict[str, object] | None = None, kv_ports: Mapping[Role, int] | None = None
) -> AsyncIterator[SmallSystem]:
    """A worker per role of ``engines``; ``flow`` as in the launch config; ``kv_ports``: where KV for a role is sent, if not to
    its worker. On leaving, every ledger must be idle and the coordinators must run nothing.
    """
    async with contextlib.AsyncExitStack() as stack:
        workers: dict[Role, WorkerHarness] = {}
        for role, engine in engines.items():
            workers[role] = await stack.enter_async_context(WorkerHarness(f"{role}-0", _maker(engine), check_idle_within_s=5.0))
        pool = await WorkerPool.connect(_topology(workers, kv_ports or {}), "a", timeout_s=10.0)
        stack.push_async_callback(pool.close)
        config = _config(engines, pipeline, flow or {})
        both = [Coordinator(config, pool, None, Metrics()) for _ in range(2)]
        for coordinator in both:
            stack.push_async_callback(coordinator.close)
        yield SmallSystem(both[0], workers, engines, both[1])
        assert [coordinator.num_running for coordinator in both] == [0, 0]


def _maker(engine: FakeEngine) -> Callable[[], FakeEngine]:
    return lambda: engine


def _topology(workers: dict[Role, WorkerHarness], kv_ports: Mapping[Role, int]) -> Topology:
    places = []
    for role, worker in workers.items():
        control, kv = Address("127.0.0.1", worker.port), Address("127.0.0.1", kv_ports.get(role, worker.kv_port))
        routes = tuple(Route(site, control, kv) for site in ("a", "b"))
        places.append(WorkerPlace(worker.name, role, SITES[role], control, kv, routes))
    return Topology(tuple(places), Address("127.0.0.1", 1), Address("127.0.0.1", 2))


def _config(engines: dict[Role, FakeEngine], pipeline: str, flow: dict[str, object]) -> LaunchConfig:
    workers = [
        {
            "name": f"{role}-0",
            "role": role,
            "site": SITES[role],
            "engine": "torch",
            "page_size": engine.config.page_size,
            "num_pages": engine.config.num_pages,
            "max_context_tokens": engine.config.max_context_tokens,
        }
        for role, engine in engines.items()
    ]
    return LaunchConfig.model_validate(
        {
            "model": "tiny",
            "sites": ["a", "b"],
            "workers": workers,
            "serving": {"site": "a"},
            "policy": {"pipeline": pipeline},
            "flow": flow,
        }
    )
