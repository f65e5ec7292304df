"""The coordinator process: composition root. Builds the worker pool, the coordinator and both front doors, serves until told to stop.

python -m pdd.serving.main --config FILE --topology FILE --cache-dir DIR
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
from pathlib import Path

import grpc.aio

from pdd import models
from pdd.config import LaunchConfig
from pdd.config import load as load_config
from pdd.errors import PddError
from pdd.launch.child import report, stay_alive, when_parent_ends
from pdd.loop_lag import watch_loop
from pdd.security_config import SecurityConfig
from pdd.serving.accounts import Accounts
from pdd.serving.coordinator import Coordinator
from pdd.serving.front import Front, Generator
from pdd.serving.grpc_door import follow_health, make_door_server, start_grpc
from pdd.serving.http_limits import HttpLimits
from pdd.serving.http_server import GRACE_S, HttpServer, bind_http, make_http_server
from pdd.serving.membership import Membership
from pdd.serving.metrics import Metrics
from pdd.serving.openai.app import create_app
from pdd.serving.parent_orders import obey
from pdd.serving.registry import registry
from pdd.serving.security_metrics import AccountCollector, ConnectionCollector
from pdd.serving.tenant_limits import TenantLimits
from pdd.serving.text.model import TextModel
from pdd.serving.worker_metrics import LeaseCollector
from pdd.serving.worker_pool import WorkerPool
from pdd.settle import one_heap, settle
from pdd.tls_setup import coordinator_rpc_tls, door_tls
from pdd.topology import Topology
from pddbridge.rpc.channel import ServerLimits, bind

log = logging.getLogger(__name__)


def main() -> None:
    one_heap()
    parser = argparse.ArgumentParser(prog="pdd.serving.main")
    for option in ("--config", "--topology", "--cache-dir"):
        parser.add_argument(option, type=Path, required=True)
    parser.add_argument("--again", action="store_true", help="after an end: serve with the workers that answer now, the others join later")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        config = load_config(arguments.config)
        asyncio.run(serve(config, arguments.topology, arguments.cache_dir, arguments.again))
    except (ValueError, OSError, PddError) as error:
        # The launcher shows the last line of stderr where a process failed to start.
        print(f"coordinator: {error}", file=sys.stderr)
        sys.exit(1)


async def serve(config: LaunchConfig, topology_file: Path, cache_dir: Path, again: bool = False) -> None:
    """Until SIGTERM, SIGINT or the parent's end. Raises ValueError or PddError, one clear line, when it cannot start."""
    topology = Topology.load(topology_file)
    orders: asyncio.Queue[bytes] = asyncio.Queue()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    when_parent_ends(loop, stop, orders.put_nowait)
    async with contextlib.AsyncExitStack() as stack:
        # Both ports first: when one is taken, that is known before anybody waits for workers.
        http_socket = stack.enter_context(contextlib.closing(bind_http(topology.http.host, topology.http.port)))
        security = config.security
        accounts = None if security.api_keys is None else Accounts(Path(security.api_keys))
        limits = ServerLimits(max_connections=security.max_connections)
        grpc_server = make_door_server(config.serving.max_body_bytes, accounts, security.public_health, limits)
        bind(grpc_server, topology.grpc.host, topology.grpc.port, door_tls(security))
        starting = asyncio.create_task(_start(config, topology_file, cache_dir, stack, accounts, orders, again))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        front, metrics = starting.result()
        await _serve_doors(front, metrics, http_socket, grpc_server, stopping, security)


async def _start(
    config: LaunchConfig,
    topology_file: Path,
    cache_dir: Path,
    stack: contextlib.AsyncExitStack,
    accounts: Accounts | None,
    orders: asyncio.Queue[bytes],
    again: bool,
) -> tuple[Front, Metrics]:
    """What stands behind the doors; ``stack`` closes it."""
    report("loading", what="tokenizer")
    text = await asyncio.to_thread(lambda: TextModel.load(models.resolve(config.model, cache_dir)))
    report("loading", what="workers")
    survival, topology = config.survival, Topology.load(topology_file)
    timeout_s = survival.lost_after_s if again else config.start_timeout_s
    tls = coordinator_rpc_tls(config)
    pool = await WorkerPool.connect(topology, config.serving.site, timeout_s, survival, patient=not again, tls=tls)
    stack.push_async_callback(pool.close)
    membership = Membership(pool, lambda: Topology.load(topology_file))
    if topology.registry is not None:
        await stack.enter_async_context(registry(membership, survival.lease_s, topology.registry, tls))
    for task in (asyncio.create_task(membership.watch()), asyncio.create_task(obey(orders, pool, membership, config.start_timeout_s))):
        stack.callback(task.cancel)
    metrics = Metrics()
    metrics.registry.register(LeaseCollector(membership, pool))
    coordinator = Coordinator(config, pool, text, metrics)
    generator: Generator = coordinator
    if accounts is not None:
        generator = limits = TenantLimits(coordinator, accounts)
        metrics.registry.register(AccountCollector(accounts, limits))
    front = Front(
        generator,
        coordinator.unhealthy_workers,
        text,
        config.serving,
        accounts,
        lambda: coordinator.latest_decisions,
        config.flow.stalled_client_s,
        lambda door: metrics.stalled_clients.labels(door).inc(),
    )
    return front, metrics


async def _serve_doors(
    front: Front,
    metrics: Metrics,
    http_socket: socket.socket,
    grpc_server: grpc.aio.Server,
    stopping: asyncio.Task[bool],
    security: SecurityConfig,
) -> None:
    limits = HttpLimits(security.max_connections, security.header_timeout_s)
    metrics.registry.register(ConnectionCollector(limits.counts))
    public = [path for path, open_to_all in (("/health", security.public_health), ("/metrics", security.public_metrics)) if open_to_all]
    http_server = make_http_server(create_app(front, metrics.registry, public), limits=limits, cert=security.door_files)
    health = await start_grpc(front, grpc_server)
    tasks = {
        "the HTTP door": asyncio.create_task(http_server.serve(sockets=[http_socket])),
        "the health watch": asyncio.create_task(follow_health(front, health)),
        "the loop watch": asyncio.create_task(watch_loop(metrics.loop_lag_s.observe)),
    }
    alive: asyncio.Task[None] | None = None
    try:
        await _http_started(http_server, tasks["the HTTP door"])
        settle()
        report("ready", http=str(http_socket.getsockname()[1]), model=front.generator.limits.model_name)
        alive = asyncio.create_task(stay_alive())
        await asyncio.wait((stopping, *tasks.values()), return_when=asyncio.FIRST_COMPLETED)
        for name, task in tasks.items():
            if task.done():
                raise ValueError(f"{name} ended unexpectedly") from task.exception()
    finally:
        if alive is not None:
            alive.cancel()
        http_server.should_exit = True
        tasks["the health watch"].cancel()
        tasks["the loop watch"].cancel()
        await asyncio.gather(health.enter_graceful_shutdown(), grpc_server.stop(GRACE_S), *tasks.values(), return_exceptions=True)


async def _http_started(server: HttpServer, task: asyncio.Task[None]) -> None:
    while not server.started and not task.done():
        await asyncio.sleep(0.01)


if __name__ == "__main__":
    main()
