"""A deployment on this machine: link emulator, workers, coordinator, each a process of its own. Owns their start, readiness and end."""

from __future__ import annotations

import queue
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import yaml

from pdd.config import LaunchConfig
from pdd.launch.held_ports import HeldPorts
from pdd.launch.link_emulator import proxy_ports
from pdd.launch.plan import plan_topology
from pdd.launch.process import ChildEvent, ChildProcess
from pdd.topology import Topology

Progress = Callable[[ChildEvent], None]
_STOP_GRACE_S = 10.0


class StartError(Exception):
    """A process ended or was not ready in time; the message is what it said last."""


class Deployment:
    """Use as a context manager: leaving it ends every process it started. ``start`` returns when all are ready. ``ports``: all that it has
    planned, nobody else's until it is left."""

    def __init__(self, config: LaunchConfig, cache_dir: Path, run_dir: Path | None = None) -> None:
        self.config = config
        self.cache_dir = cache_dir
        self.ports = HeldPorts()
        self.topology: Topology = plan_topology(config, self.ports)
        self._cleanup: Callable[[], None] | None = None
        if run_dir is None:
            temporary = tempfile.TemporaryDirectory(prefix="pdd-")
            run_dir, self._cleanup = Path(temporary.name), temporary.cleanup
        self.run_dir = run_dir
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.processes: dict[str, ChildProcess] = {}
        self._ready: set[str] = set()
        self._events: queue.Queue[ChildEvent] = queue.Queue()
        self._coordinators: dict[str, tuple[LaunchConfig, Topology]] = {}

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def http_url(self) -> str:
        return f"{'http' if self.config.security.door_files is None else 'https'}://{self.topology.http}"

    def start(self, progress: Progress | None = None) -> float:
        """Start everything; returns seconds until ready. Raises StartError; nothing is left running then."""
        started_s = time.monotonic()
        deadline_s = started_s + self.config.start_timeout_s
        try:
            self.start_workers()
            self.wait_ready(deadline_s, progress)
            self.start_coordinator("coordinator", self.config, self.topology)
            self.wait_ready(deadline_s, progress)
        except BaseException:
            self.stop()
            raise
        return time.monotonic() - started_s

    def start_workers(self) -> None:
        """The link emulator, where a link is emulated, and all workers."""
        config_file, topology_file = self.write_files("main", self.config, self.topology)
        arguments = ["--config", str(config_file), "--topology", str(topology_file)]
        if proxy_ports(self.config, self.topology):
            self.start_link(arguments)
        for worker in self.config.workers:
            self.start_worker(worker.name, arguments)

    def start_link(self, arguments: list[str] | None = None) -> None:
        """Start (or start again, on the same ports) the link emulator."""
        self._spawn("link", ["pdd.launch.link_emulator", *(arguments or self._files("main"))])

    def start_worker(self, name: str, arguments: list[str] | None = None) -> None:
        """Start (or start again, on the same ports) one worker."""
        arguments = arguments or self._files("main")
        self._spawn(name, ["pdd.worker.main", *arguments, "--name", name, "--cache-dir", str(self.cache_dir)])

    def start_coordinator(self, name: str, config: LaunchConfig, topology: Topology) -> None:
        """A coordinator over these workers; benchmarks start several with different policies and routes."""
        self.write_files(name, config, topology)
        self._coordinators[name] = (config, topology)
        self._spawn_coordinator(name)

    def restart(self, name: str) -> None:
        """Start again, on the same ports, whatever process of this deployment has that name."""
        if name in self._coordinators:
            self._spawn_coordinator(name, "--again")
        elif name == "link":
            self.start_link()
        else:
            self.start_worker(name)

    def wanted(self, name: str) -> bool:
        """Whether a process of that name should be running."""
        return name in self.processes

    def own_coordinators(self) -> list[ChildProcess]:
        """Those over this deployment's own topology, which learn of its changes."""
        return [self.processes[name] for name, (_, topology) in self._coordinators.items() if topology == self.topology]

    def change(self, config: LaunchConfig, topology: Topology) -> None:
        """Other workers than before: in the files of the workers and of the coordinators whose topology was this one's."""
        own = [name for name, (_, known) in self._coordinators.items() if known == self.topology]
        self.config, self.topology = config, topology
        for name in ("main", *own):
            self.write_files(name, config, topology)
        self._coordinators.update(dict.fromkeys(own, (config, topology)))

    def end(self, name: str) -> None:
        """A process that is not wanted any more; killed when it does not end."""
        child = self.processes.pop(name, None)
        self._ready.discard(name)
        if child is not None:
            child.ask_to_stop()
            child.wait(time.monotonic() + _STOP_GRACE_S)

    def is_worker(self, name: str) -> bool:
        return any(worker.name == name for worker in self.config.workers)

    def silences(self) -> dict[str, float]:
        """Seconds since each running process that was ready said that it is alive."""
        now = time.monotonic()
        return {n: now - child.heard_s for n, child in list(self.processes.items()) if child.heard_s is not None and child.running()}

    def _spawn_coordinator(self, name: str, *more: str) -> None:
        self._spawn(name, ["pdd.serving.main", *self._files(name), "--cache-dir", str(self.cache_dir), *more])

    def _files(self, stem: str) -> list[str]:
        return ["--config", str(self.run_dir / f"{stem}.yaml"), "--topology", str(self.run_dir / f"{stem}.json")]

    def write_files(self, stem: str, config: LaunchConfig, topology: Topology) -> tuple[Path, Path]:
        config_file, topology_file = self.run_dir / f"{stem}.yaml", self.run_dir / f"{stem}.json"
        config_file.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
        topology.save(topology_file)
        return config_file, topology_file

    def wait_ready(self, deadline_s: float, progress: Progress | None = None) -> None:
        """Until every process started so far has reported ready (monotonic deadline)."""
        while waiting := [name for name in self.processes if name not in self._ready]:
            try:
                event = self._events.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise StartError(f"not ready after {self.config.start_timeout_s:.0f} s: {', '.join(waiting)}") from None
            if progress is not None:
                progress(event)
            if event.event == "ready":
                self._ready.add(event.name)
            elif event.event == "exited" and event.name in self.processes:
                child = self.processes[event.name]
                raise StartError(child.last_words(1) or f"{event.name} ended with status {event.fields['status']}")

    def first_exit(self, timeout_s: float) -> ChildEvent | None:
        """Wait up to ``timeout_s`` for some process to end; None when all still run."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=left_s)
            except queue.Empty:
                return None
            if event.event == "exited":
                return event
        return None

    def stop(self) -> list[str]:
        """End every process, the last started first; returns the names of those that had to be killed."""
        order = list(reversed(self.processes.values()))
        for child in order:
            child.ask_to_stop()
        deadline_s = time.monotonic() + _STOP_GRACE_S
        killed = [child.name for child in order if not child.wait(deadline_s)]
        self.processes.clear()
        self._ready.clear()
        self.ports.release()
        if self._cleanup is not None:
            self._cleanup()
        return killed

    def _spawn(self, name: str, module_and_arguments: list[str]) -> None:
        self._ready.discard(name)
        argv = [sys.executable, "-m", *module_and_arguments]
        self.processes[name] = ChildProcess(name, argv, {"PYTHONUNBUFFERED": "1"}, self.run_dir / f"{name}.log", self._events)
