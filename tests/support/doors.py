"""Both front doors on real sockets over a scripted coordinator, and bare clients of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import httpx
import openai

from pdd.config import ServingConfig
from pdd.serving.accounts import Accounts
from pdd.serving.front import Front, Generator
from pdd.serving.grpc_door import follow_health, make_door_server, start_grpc
from pdd.serving.http_limits import HttpLimits
from pdd.serving.http_server import HttpServer, bind_http, make_http_server
from pdd.serving.metrics import Metrics
from pdd.serving.openai.app import create_app
from pdd.serving.tenant_limits import TenantLimits
from pddbridge.rpc.channel import bind, open_channel
from tests.support.scripted_coordinator import ScriptedCoordinator

SERVING = ServingConfig(site="a", allow_override=True, max_body_bytes=64 * 1024, default_max_tokens=7, max_queued_requests=64)


@dataclass
class Doors:
    """``unhealthy``: what the doors are told of the workers; tests change it."""

    coordinator: ScriptedCoordinator
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    channel: grpc.aio.Channel
    http_port: int
    http_server: HttpServer
    unhealthy: list[str] = field(default_factory=list)
    stalled: list[str] = field(default_factory=list)

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        """``body``: JSON to be, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(path, content=content, headers={"content-type": "application/json", **headers})

    async def events(self, path: str, body: dict[str, object]) -> list[str]:
        """The data of every event of a stream."""
        answer = await self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.text.split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") for line in lines)
        return [line.removeprefix("data: ") for line in lines]

    async def chunks(self, path: str, body: dict[str, object]) -> list[dict[str, object]]:
        """The chunks of a stream that ends well."""
        events = await self.events(path, body)
        assert events.pop() == "[DONE]"
        return [json.loads(data) for data in events]

    async def idle(self) -> None:
        """Returns once no generation is open; the caller bounds the time."""
        await until(lambda: not self.coordinator.running)


@contextlib.asynccontextmanager
async def open_doors(
    coordinator: ScriptedCoordinator,
    serving: ServingConfig = SERVING,
    grace_s: int = 3,
    accounts: Accounts | None = None,
    limits: HttpLimits | None = None,
    stalled_after_s: float = 60.0,
) -> AsyncGenerator[Doors, None]:
    """``accounts``: keys are asked for, and the tenants' limits hold. ``stalled_after_s``: clients that take nothing for so long are cut
    off, and told in ``stalled``.
    """
    stalled: list[str] = []
    unhealthy: list[str] = []
    generator: Generator = coordinator if accounts is None else TenantLimits(coordinator, accounts)
    front = Front(
        generator, lambda: unhealthy, coordinator.text, serving, accounts, stalled_after_s=stalled_after_s, stalled=stalled.append
    )
    bound = bind_http("127.0.0.1", 0)
    http_port = bound.getsockname()[1]
    http_server = make_http_server(create_app(front, Metrics().registry), grace_s, limits)
    serving_http = asyncio.create_task(http_server.serve(sockets=[bound]))
    grpc_server = make_door_server(serving.max_body_bytes, accounts)
    grpc_port = bind(grpc_server, "127.0.0.1", 0)
    status = await start_grpc(front, grpc_server)
    watching = asyncio.create_task(follow_health(front, status, period_s=0.02))
    base = f"http://127.0.0.1:{http_port}"
    try:
        await until(lambda: http_server.started)
        async with (
            httpx.AsyncClient(base_url=base, timeout=20, trust_env=False) as http,
            openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, http_client=_bare_client(base)) as client,
            open_channel("127.0.0.1", grpc_port) as channel,
        ):
            yield Doors(coordinator, http, client, channel, http_port, http_server, unhealthy, stalled)
    finally:
        http_server.should_exit = True
        watching.cancel()
        await asyncio.gather(grpc_server.stop(0), serving_http, watching, return_exceptions=True)
        bound.close()
    assert not coordinator.running, "generations left open"


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def _bare_client(base: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"{base}/v1", timeout=20, trust_env=False)
