"""The worker as a process: it starts, says so, serves, and ends with its parent, with one clear line where it cannot start."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdd.config import LaunchConfig
from pdd.launch.held_ports import HeldPorts
from pdd.launch.plan import plan_topology
from pdd.launch.process import ChildEvent, ChildProcess
from pdd.topology import Address, Topology
from pddbridge.give_way import COMPUTE_NICE
from pddbridge.rpc.convert import params_to_proto
from pddbridge.rpc.gen import worker_pb2, worker_pb2_grpc
from pddbridge.sampling_params import SamplingParams
from tests.support.deployments import launch_config
from tests.support.tiny_models import make_tiny_llama

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]

START_TIMEOUT_S = 1500.0  # its cache is empty, so it compiles native code: a minute of processor time, whenever it gets that
STOP_TIMEOUT_S = 15.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), num_layers=2)


class Process:
    """One worker process of a launch config; ``ended`` gives status and last words."""

    def __init__(self, config: LaunchConfig, topology: Topology, folder: Path, name: str = "main-0") -> None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        topology.save(folder / "topology.json")
        files = ["--config", str(folder / "config.yaml"), "--topology", str(folder / "topology.json"), "--cache-dir", str(folder / "cache")]
        self.events: queue.Queue[ChildEvent] = queue.Queue()
        argv = [sys.executable, "-m", "pdd.worker.main", *files, "--name", name]
        self.child = ChildProcess(name, argv, {}, folder / "log", self.events)

    def until(self, event: str) -> list[ChildEvent]:
        """Events up to ``event``."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        seen: list[ChildEvent] = []
        while not seen or seen[-1].event != event:
            seen.append(self.events.get(timeout=deadline_s - time.monotonic()))
            assert seen[-1].event in (event, "loading", "warm_up"), (seen[-1], self.child.last_words())
        return seen

    def ended(self) -> tuple[int, str]:
        exited = self.until("exited")[-1]
        return int(exited.fields["status"]), self.child.last_words(1)


@pytest.fixture
def started() -> Iterator[list[Process]]:
    """Append what a test starts; nothing is left running."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.child.kill()


@pytest.fixture
def ports() -> Iterator[HeldPorts]:
    with HeldPorts() as held:
        yield held


def torch_config(model: Path | str) -> LaunchConfig:
    return launch_config(str(model), engines=("torch", "torch", "torch"))


def health(address: Address) -> int:
    with grpc.insecure_channel(str(address)) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="pdd.v1.Worker"), timeout=5, wait_for_ready=True
        )
    return int(reply.status)


def niceness_and_cores(pid: int) -> tuple[dict[str, int], dict[str, set[int]]]:
    """By name and number of thread, and what it may run on."""
    nice, cores = {}, {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        nice[f"{name} {task.name}"] = int(rest.split()[16])
        cores[f"{name} {task.name}"] = os.sched_getaffinity(int(task.name))
    return nice, cores


def opening(hold: threading.Event) -> Iterator[worker_pb2.WorkerCommand]:
    """An open and then nothing more: the stream is the hold."""
    params = params_to_proto(SamplingParams(seed=1, max_tokens=5, temperature=0.0))
    yield worker_pb2.WorkerCommand(
        open=worker_pb2.Open(
            request_id="r", prompt_ids=range(10, 60), sampling=params, kv_source=worker_pb2.KV_SOURCE_COMPUTE, decode=True, timeout_s=30
        )
    )
    hold.wait(START_TIMEOUT_S)


def test_it_serves_and_ends_with_its_parent(model: Path, tmp_path: Path, started: list[Process], ports: HeldPorts) -> None:
    config = torch_config(model)
    topology = plan_topology(config, ports)
    address = topology.worker("main-0").control
    process = Process(config, topology, tmp_path)
    started.append(process)
    process.until("loading")
    assert health(address) == health_pb2.HealthCheckResponse.NOT_SERVING
    with grpc.insecure_channel(str(address)) as channel:
        assert not worker_pb2_grpc.WorkerStub(channel).Info(worker_pb2.InfoRequest(), timeout=5).ready
    events = process.until("ready")
    warm_up = [event.fields for event in events if event.event == "warm_up"]
    assert [fields["done"] for fields in warm_up] == list(range(1, len(warm_up) + 1))
    assert warm_up[-1]["done"] == warm_up[-1]["total"]
    assert health(address) == health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(str(address)) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        info = stub.Info(worker_pb2.InfoRequest(), timeout=5)
        assert (info.ready, info.engine, info.name, info.model_name) == (True, "torch", "main-0", str(model))
        hold = threading.Event()
        call = stub.Attach(opening(hold))
        kinds = [next(call).WhichOneof("event") for _ in range(7)]
        assert kinds == ["reserved", "prefilled", *["tokens"] * 5]
        process.child.ask_to_stop()
        last = list(call)
        hold.set()
        assert [event.failed.code for event in last] == ["UNAVAILABLE"]
    assert process.child.wait(time.monotonic() + STOP_TIMEOUT_S)
    assert process.ended()[0] == 0


@pytest.mark.parametrize(("worker", "threads"), [("prefill-0", "tf_XLAEigen"), ("main-0", "python")])
def test_compute_threads_have_their_cores_and_give_way_to_the_event_loop(
    worker: str, threads: str, model: Path, tmp_path: Path, started: list[Process], ports: HeldPorts
) -> None:
    all_cores = os.sched_getaffinity(0)
    one = {max(all_cores)}
    config = launch_config(str(model), engines=("jax", "jax", "torch"))
    config = config.model_copy(update={"workers": tuple(each.model_copy(update={"cpus": tuple(one)}) for each in config.workers)})
    process = Process(config, plan_topology(config, ports), tmp_path, worker)
    started.append(process)
    process.until("ready")
    pid, own = process.child.pid, os.getpriority(os.PRIO_PROCESS, 0)
    found, bound = niceness_and_cores(pid)
    assert bound.pop(next(name for name in bound if name.endswith(f" {pid}"))) == all_cores, "the event loop runs where it can"
    assert one in [where for name, where in bound.items() if name.startswith(threads)]
    assert all(where == one for name, where in bound.items() if name.startswith("tf_XLA"))
    nicer = min(own + COMPUTE_NICE, 19)
    assert found.pop(next(name for name in found if name.endswith(f" {pid}"))) == own  # the event loop is the main thread
    assert nicer in [nice for name, nice in found.items() if name.startswith(threads)]
    assert {nice for name, nice in found.items() if name.startswith("tf_XLA")} <= {nicer}
    assert os.getsid(pid) == os.getsid(0) != os.getpgid(pid) == pid


def test_sigterm_while_loading_ends_it(model: Path, tmp_path: Path, started: list[Process], ports: HeldPorts) -> None:
    config = torch_config(model)
    process = Process(config, plan_topology(config, ports), tmp_path)
    started.append(process)
    process.until("loading")
    process.child._popen.send_signal(signal.SIGTERM)
    assert process.child.wait(time.monotonic() + STOP_TIMEOUT_S)
    assert process.ended()[0] == 0


@pytest.mark.parametrize("which", ["control", "kv"])
def test_a_port_in_use_is_one_clear_line(which: str, model: Path, tmp_path: Path, started: list[Process], ports: HeldPorts) -> None:
    config = torch_config(model)
    topology = plan_topology(config, ports)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        places = tuple(replace(w, **{which: Address("127.0.0.1", port)}) if w.name == "main-0" else w for w in topology.workers)
        process = Process(config, replace(topology, workers=places), tmp_path)
        started.append(process)
        status, line = process.ended()
    assert status == 1
    assert line.startswith("worker main-0: ")
    assert f"cannot listen on 127.0.0.1:{port}" in line


def test_what_cannot_be_served_is_one_clear_line(model: Path, tmp_path: Path, started: list[Process], ports: HeldPorts) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = make_tiny_llama(tmp_path / "broken", num_layers=2)
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1000])
    for name, config, worker, expected in [
        ("unknown-worker", torch_config(model), "main-7", "--name: given 'main-7', allowed"),
        ("unknown-model", torch_config("no-such-model"), "main-0", "no-such-model"),
        ("no-checkpoint", torch_config(empty), "main-0", "empty"),
        ("broken", torch_config(broken), "main-0", weights.name),
        ("context", torch_config(make_tiny_llama(tmp_path / "short", num_layers=1, max_context=64)), "main-0", "max_context_tokens"),
    ]:
        folder = tmp_path / f"run-{name}"
        folder.mkdir()
        process = Process(config, plan_topology(config, ports), folder, worker)
        started.append(process)
        status, line = process.ended()
        assert (status, line.startswith(f"worker {worker}: ")) == (1, True), line
        assert expected in line, line
