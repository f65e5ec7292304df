"""The coordinator process: start, refusals at start with one clear line, and ends that leave nothing running."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc.aio
import httpx
import pytest
import yaml

from pdd.topology import Address, Route, Topology, WorkerPlace
from pddbridge.rpc.channel import bind, make_server
from pddbridge.rpc.gen import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.tiny_models import make_tiny_llama


class InfoOnly(worker_pb2_grpc.WorkerServicer):
    """A worker that only says what it is: enough for the coordinator to start."""

    def __init__(self, name: str, fingerprint: str, ready: bool) -> None:
        self.info = worker_pb2.WorkerInfo(
            name=name, epoch=1, fingerprint=fingerprint, model_name="tiny", ready=ready, max_context_tokens=48, vocab_size=300, max_rows=1
        )

    async def Info(  # noqa: N802
        self, _request: worker_pb2.InfoRequest, _context: grpc.aio.ServicerContext[worker_pb2.InfoRequest, worker_pb2.WorkerInfo]
    ) -> worker_pb2.WorkerInfo:
        return self.info


class Process:
    """``python -m pdd.serving.main`` over InfoOnly workers."""

    def __init__(self, popen: asyncio.subprocess.Process, topology: Topology) -> None:
        self.popen = popen
        self.topology = topology

    async def event(self, name: str) -> dict[str, object]:
        async with asyncio.timeout(30):
            while line := await self.popen.stdout.readline():
                found = json.loads(line)
                if found["event"] == name:
                    return found
        raise AssertionError(f"ended without {name}: {(await self.popen.stderr.read()).decode()}")

    async def end(self, within_s: float) -> tuple[int, list[str]]:
        """Exit status and the lines of stderr."""
        async with asyncio.timeout(within_s):
            stderr = await self.popen.stderr.read()
            return await self.popen.wait(), stderr.decode().splitlines()


@contextlib.asynccontextmanager
async def start(
    directory: Path, *, fingerprints: tuple[str, str] = ("f", "f"), ready: bool = True, model: str | None = None, taken: str | None = None
) -> AsyncGenerator[Process, None]:
    """``taken``: "http" or "grpc" port that somebody else listens on."""
    workers, places = [], []
    for role, fingerprint in zip(("prefill", "main"), fingerprints, strict=True):
        server = make_server()
        worker_pb2_grpc.add_WorkerServicer_to_server(InfoOnly(f"{role}-0", fingerprint, ready), server)
        address = Address("127.0.0.1", bind(server, "127.0.0.1", 0))
        await server.start()
        workers.append(server)
        places.append(WorkerPlace(f"{role}-0", role, "a", address, address, (Route("a", address, address),)))
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as grpc_socket:
        topology = Topology(tuple(places), Address(*http.getsockname()), Address(*grpc_socket.getsockname()))
        for name, listener in (("http", http), ("grpc", grpc_socket)):
            if name != taken:
                listener.close()
        topology.save(directory / "t.json")
        (directory / "c.yaml").write_text(yaml.safe_dump(_config(model or str(make_tiny_llama(directory / "tiny", num_layers=1)))))
        files = ["--config", str(directory / "c.yaml"), "--topology", str(directory / "t.json"), "--cache-dir", str(directory)]
        pipe = asyncio.subprocess.PIPE
        popen = await asyncio.create_subprocess_exec(sys.executable, "-m", "pdd.serving.main", *files, stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            yield Process(popen, topology)
        finally:
            if popen.returncode is None:
                popen.kill()
            await popen.wait()
            await asyncio.gather(*(server.stop(0) for server in workers))


def _config(model: str) -> dict[str, object]:
    worker = {"site": "a", "engine": "jax", "page_size": 4, "num_pages": 12, "max_context_tokens": 48}
    return {
        "model": model,
        "sites": ["a"],
        "workers": [{"name": "prefill-0", "role": "prefill", **worker}, {"name": "main-0", "role": "main", **worker}],
        "serving": {"site": "a"},
        "start_timeout_s": 20.0,
    }


@pytest.mark.parametrize("way", ["terminate", "interrupt", "parent ends"])
async def test_it_serves_and_ends_when_told(tmp_path: Path, way: str) -> None:
    async with start(tmp_path) as process:
        ready = await process.event("ready")
        assert ready["model"] == "tiny"
        topology = process.topology
        async with httpx.AsyncClient(base_url=f"http://{topology.http}", trust_env=False) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] == 48
            async with grpc.aio.insecure_channel(str(topology.grpc)) as channel:
                listed = await inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest())
            assert [model.name for model in listed.models] == ["tiny"]
            # The client's connection stays open: an idle one does not hold up the end.
            if way == "parent ends":
                process.popen.stdin.close()
            else:
                process.popen.send_signal(signal.SIGTERM if way == "terminate" else signal.SIGINT)
            status, lines = await process.end(within_s=5)
    assert status == 0
    assert not any("Traceback" in line for line in lines), lines


@pytest.mark.parametrize("taken", ["http", "grpc"])
async def test_a_port_in_use_is_one_clear_line(tmp_path: Path, taken: str) -> None:
    async with start(tmp_path, taken=taken) as process:
        status, lines = await process.end(within_s=20)
        port = process.topology.http.port if taken == "http" else process.topology.grpc.port
    assert status == 1
    assert f"127.0.0.1:{port}" in lines[-1]
    assert "in use" in lines[-1].lower()
    assert not any("Traceback" in line for line in lines), lines


async def test_workers_that_do_not_fit_are_one_clear_line(tmp_path: Path) -> None:
    async with start(tmp_path, fingerprints=("aaaa", "bbbb")) as process:
        status, lines = await process.end(within_s=20)
    assert status == 1
    assert "aaaa" in lines[-1]
    assert "bbbb" in lines[-1]
    assert "prefill-0" in lines[-1]
    assert not any("Traceback" in line for line in lines), lines


async def test_an_unknown_model_is_one_clear_line(tmp_path: Path) -> None:
    async with start(tmp_path, model="no-such-model") as process:
        status, lines = await process.end(within_s=20)
    assert status == 1
    assert "no-such-model" in lines[-1]


async def test_it_ends_at_once_while_it_waits_for_workers(tmp_path: Path) -> None:
    async with start(tmp_path, ready=False) as process:
        found = await process.event("loading")
        while found["what"] != "workers":
            found = await process.event("loading")
        process.popen.terminate()
        status, lines = await process.end(within_s=5)
    assert status == 0
    assert not any("Traceback" in line for line in lines), lines
