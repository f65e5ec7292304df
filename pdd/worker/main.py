"""A worker process: composition root. Starts the engine named in the launch config, serves ``pdd.v1.Worker`` until told to stop.

python -m pdd.worker.main --config FILE --topology FILE --name WORKER --cache-dir DIR

Reports loading, warm_up and ready on stdout. Ends with status 0 on SIGTERM, SIGINT or when its parent ends; with status 1 and one clear
last line on stderr when it cannot start.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pdd import models
from pdd.config import LaunchConfig, WorkerConfig
from pdd.config import load as load_config
from pdd.errors import Code
from pdd.launch.child import report, stay_alive, when_parent_ends
from pdd.security_config import is_loopback
from pdd.settle import one_heap, settle
from pdd.tls_setup import to_coordinator, worker_guards, worker_rpc_tls
from pdd.topology import Topology
from pdd.worker.cores import compute_on
from pdd.worker.executor import ExecutorLimits
from pdd.worker.kv_codecs import CodecChoice, codecs_taken, measure_codecs
from pdd.worker.neighbours import Neighbours
from pdd.worker.registrar import Registrar
from pdd.worker.self_watch import SelfWatch
from pdd.worker.service import Runtime, WorkerService
from pdd.worker.step_loop import THREAD_NAME, EngineFacts, StepLoop
from pdd.worker.transfers import KVTraffic
from pddbridge.engine import Engine, EngineConfig, EngineFactory
from pddbridge.fingerprint import fingerprint
from pddbridge.give_way import give_way
from pddbridge.links.nixl import NixlAgent, NixlError, installed
from pddbridge.links.tcp import PROTOCOL_VERSION, Handshake
from pddbridge.native.checksum import fastest_checksum
from pddbridge.native.copy import fastest_copy
from pddbridge.rpc.channel import bind, make_server, open_channel
from pddbridge.rpc.gen import worker_pb2_grpc

logger = logging.getLogger(__name__)

SERVICE_NAME = "pdd.v1.Worker"
_STOP_GRACE_S = 1.0
_JOIN_S = 5.0


class WorkerError(Exception):
    """The worker cannot start or go on; the message is the one line to show."""


def main() -> None:
    one_heap()
    parser = argparse.ArgumentParser(prog="pdd.worker.main")
    for option in ("--config", "--topology", "--cache-dir"):
        parser.add_argument(option, type=Path, required=True)
    parser.add_argument("--name", required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    status = 0
    try:
        config = load_config(arguments.config)
        worker = next((w for w in config.workers if w.name == arguments.name), None)
        if worker is None:
            raise ValueError(f"--name: given {arguments.name!r}, allowed {[w.name for w in config.workers]}")
        asyncio.run(_run(config, worker, arguments.topology, arguments.cache_dir))
    except (ValueError, KeyError, OSError, WorkerError) as error:
        # The launcher shows the last line of stderr where a process failed to start.
        print(f"worker {arguments.name}: {' '.join(str(error).split())}", file=sys.stderr)
        status = 1
    if any(thread.name == THREAD_NAME for thread in threading.enumerate()):
        # The step thread is inside a framework's start-up, which nothing can interrupt; the interpreter would tear it down half way.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


async def _run(config: LaunchConfig, worker: WorkerConfig, topology_file: Path, cache_dir: Path) -> None:
    """Serve until told to stop. Raises ValueError or WorkerError, one clear line, when it cannot start or go on."""
    topology = Topology.load(topology_file)
    place = topology.worker(worker.name)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    neighbours = Neighbours(config, worker, topology, topology_file)
    when_parent_ends(loop, stop, lambda line: _obey(line, neighbours, topology_file))
    guards = worker_guards(config, worker)
    service = WorkerService(worker.name, secrets.randbelow(2**64 - 1) + 1, guards)
    health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the published stubs do not know it
    tls = worker_rpc_tls(config, worker)
    server = make_server(interceptors=guards)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    bind(server, place.control.host, place.control.port, tls)  # first of all: a port in use is known before anything is loaded
    make_engine = _engine_factory(config, worker, models.resolve(worker.model or config.model, cache_dir), cache_dir)
    for name in ("", SERVICE_NAME):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.start()
    crash: asyncio.Future[None] = loop.create_future()

    def crashed(error: BaseException) -> None:
        service.fail_all(Code.INTERNAL, f"the worker crashed: {error}")
        crash.set_exception(WorkerError(f"the step loop crashed: {error!r}"))

    limits = ExecutorLimits(max_decode_wait_chunks=worker.max_decode_wait_chunks, host_cache_bytes=worker.host_cache_mib * 2**20)
    report("loading", what=f"{worker.model or config.model} into {worker.engine}")
    step_loop = StepLoop(make_engine, loop, service.deliver, crashed, _report_warm_up, worker.prefix_cache, limits)
    step_loop.start()
    stopping = asyncio.create_task(stop.wait())
    traffic: KVTraffic | None = None
    registrar: Registrar | None = None
    registering: asyncio.Task[None] | None = None
    alive: asyncio.Task[None] | None = None
    watch: SelfWatch | None = None
    # While the engine loads: NIXL takes a second, too.
    nixl = asyncio.create_task(_start_nixl(config, worker, service.epoch))
    try:
        ready = asyncio.wrap_future(step_loop.ready)
        await asyncio.wait((ready, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            return
        facts = _facts(ready)
        semantic = fingerprint(facts.spec, facts.weights_digest, facts.kv_spec)
        speeds = await asyncio.to_thread(measure_codecs, facts.kv_spec) if any(worker.site in link.between for link in config.links) else ()
        codecs = CodecChoice(neighbours.rules, speeds, codecs_taken(config, worker.site))
        handshake = Handshake(PROTOCOL_VERSION, semantic, facts.kv_spec, service.epoch, worker.name)
        checksum, slow_checksum = await asyncio.to_thread(fastest_checksum, _compile_cache_dir(cache_dir, worker))
        copy, slow_copy = await asyncio.to_thread(fastest_copy, _compile_cache_dir(cache_dir, worker))
        natives = (checksum, copy, {**slow_checksum, **slow_copy})
        around = (neighbours.known, neighbours.link_tls, neighbours.remote, neighbours.shared, *natives)
        traffic = KVTraffic(handshake, step_loop, await nixl, codecs, *around)
        try:
            await traffic.start(place.kv.host, place.kv.port)
        except OSError as error:
            raise WorkerError(f"kv_port: cannot listen on {place.kv}: {error.strerror or error}") from error
        settle()
        service.begin(Runtime(facts, config.model, semantic, step_loop, traffic, neighbours.receivers))
        for name in ("", SERVICE_NAME):
            await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        report("ready")
        alive = asyncio.create_task(stay_alive())
        watch = SelfWatch(lambda: step_loop.turn, config.survival.exit_after_s)
        watch.start()
        if topology.registry is not None:
            channel = open_channel(topology.registry.host, topology.registry.port, secured=to_coordinator(tls))
            registrar = Registrar(channel, place, service.epoch, semantic)
            registering = asyncio.create_task(registrar.run(lambda: setattr(service, "draining", True)))
        await asyncio.wait((crash, stopping), return_when=asyncio.FIRST_COMPLETED)
        if crash.done():
            crash.result()
    finally:
        stopping.cancel()
        if registering is not None and registrar is not None:
            registering.cancel()
            await registrar.close()
        if alive is not None:
            alive.cancel()
        if watch is not None:
            watch.stop()
        await health_servicer.enter_graceful_shutdown()
        await service.end()
        await server.stop(_STOP_GRACE_S)
        if traffic is not None:
            await traffic.close()
        if (agent := await nixl) is not None:
            await agent.close()
        step_loop.stop()
        await asyncio.to_thread(step_loop.join, _JOIN_S if traffic is not None else 0.0)


def _obey(line: bytes, neighbours: Neighbours, topology_file: Path) -> None:
    """The launcher's orders on stdin: ``reload``, when workers have joined or left, answered by ``reloaded``."""
    try:
        if line.strip() != b"reload":
            raise ValueError("not an order")
        neighbours.apply(Topology.load(topology_file))
        report("reloaded", order="reload")
    except (OSError, ValueError, KeyError) as error:
        report("refused", order=line.decode("utf-8", "replace"), why=str(error))


async def _start_nixl(config: LaunchConfig, worker: WorkerConfig, epoch: int) -> NixlAgent | None:
    """The agent, where the config allows NIXL and it is installed and works."""
    if config.local_link not in ("auto", "nixl"):
        return None
    if not config.security.allows_nixl():
        logger.info("no nixl: what it carries is not encrypted, and worker_tls is %r", config.security.worker_tls)
        return None
    if not installed():
        logger.info("nixl is not installed")
        return None
    if is_loopback(worker.host):
        # UCX would listen on every interface; it is told before it is loaded.
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    agent = NixlAgent(f"pdd-{epoch:016x}")
    try:
        await agent.start()
    except NixlError:
        logger.exception("nixl is installed and does not start")
        return None
    return agent


def _compile_cache_dir(cache_dir: Path, worker: WorkerConfig) -> str:
    return str(cache_dir / "compiled" / worker.engine)


def _engine_factory(config: LaunchConfig, worker: WorkerConfig, model_dir: Path, cache_dir: Path) -> Callable[[], Engine]:
    """Builds the engine, in the thread that calls it. The engine's environment is set before its framework is imported."""
    engine_config = EngineConfig(
        device=worker.device,
        compute_dtype=worker.compute_dtype,
        kv_dtype=config.kv_dtype,
        page_size=worker.page_size,
        num_pages=worker.num_pages,
        max_context_tokens=worker.max_context_tokens,
        max_step_tokens=worker.max_step_tokens,
        max_rows=worker.max_rows,
        num_threads=worker.threads,
        compile_cache_dir=_compile_cache_dir(cache_dir, worker),
        num_devices=worker.num_devices,
        run_ahead=_pays(worker.run_ahead, worker.device),
        sample_on_device=_pays(worker.sample_on_device, worker.device),
        decode_graphs=worker.decode_graphs != "off" and worker.can_replay,
    )
    environment = importlib.import_module(f"pdd{worker.engine}.threads").environment
    os.environ.update(environment(worker.threads, worker.device, worker.num_devices, worker.idle_threads == "spin"))

    def make_engine() -> Engine:
        # This thread, and those that the engine starts.
        if worker.cpus is not None:
            compute_on(worker.cpus)
        if worker.nice:
            give_way(worker.nice)
        create: EngineFactory = importlib.import_module(f"pdd{worker.engine}.engine").create
        return create(str(model_dir), engine_config)

    return make_engine


def _pays(wish: Literal["auto", "on", "off"], device: str) -> bool:
    """Of what is for devices that compute beside the host."""
    return wish == "on" or (wish == "auto" and device != "cpu")


def _facts(ready: asyncio.Future[EngineFacts]) -> EngineFacts:
    """Raises ValueError as the engine did, WorkerError for anything else that it raised."""
    try:
        return ready.result()
    except ValueError:
        raise
    except Exception as error:
        raise WorkerError(f"the engine did not start: {type(error).__name__}: {error}") from error


def _report_warm_up(done: int, total: int, what: str) -> None:
    report("warm_up", done=done, total=total, what=what)


if __name__ == "__main__":
    main()
