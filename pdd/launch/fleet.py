"""Workers that are added to a running deployment and taken out of it, while requests run. Owns the order of the steps.

To add: ports, link, process, its peers, then the coordinators: nobody is told of a worker that could not be reached yet. To take out: the
coordinators first, which wait until it holds nothing, then its process, then the peers. Every address comes from here, the operator's side.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace

from pdd.config import LaunchConfig, WorkerConfig
from pdd.launch.link_emulator import proxy_ports
from pdd.launch.local import Deployment, StartError
from pdd.launch.plan import plan_worker, release_worker
from pdd.launch.process import ChildProcess
from pdd.roles import Role

_RELOAD_S = 30.0
_LIST_S = 10.0
# Roles without which nothing can be served.
_NEEDED: tuple[Role, ...] = ("prefill", "main")

WorkerState = dict[str, str | int | float | None]


class FleetError(ValueError):
    """What was asked for cannot be done, or did not come about; the message is one line to show."""


class Fleet:
    """One change at a time, from any thread. Coordinators whose topology is not the deployment's own (benchmarks) do not learn of it."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._lock = threading.Lock()
        # The first of each role stands for those that come later, also after it has left.
        self._models: dict[Role, WorkerConfig] = {}
        for worker in deployment.config.workers:
            self._models.setdefault(worker.role, worker)

    def scale(self, role: Role, count: int) -> None:
        """Add or take out workers of ``role`` until there are ``count``; the last that came go first. Raises FleetError."""
        names = self.names(role)
        self.add(role, count - len(names))
        self.drain(names[count:])

    def names(self, role: Role) -> list[str]:
        return [worker.name for worker in self._deployment.config.workers if worker.role == role]

    def add(self, role: Role, count: int = 1) -> list[str]:
        """``count`` more workers like the first of ``role``; returns their names when they serve. Raises FleetError; those that did not get
        ready are ended then.
        """
        with self._lock:
            if role not in self._models:
                raise FleetError(f"role: given {role!r}, the config has workers for {sorted(self._models)}")
            names = [self._enlist(role) for _ in range(count)]
            try:
                self._start(names)
            except (OSError, TimeoutError, ValueError, StartError) as error:
                self._strike_off(names)
                raise FleetError(f"{', '.join(names)}: {' '.join(str(error).split())}") from error
            return names

    def drain(self, names: list[str]) -> None:
        """Take these workers out: nothing new for them, what they hold ends or is moved, then they end. Raises FleetError."""
        with self._lock:
            config = self._deployment.config
            left = {worker.role for worker in config.workers if worker.name not in names}
            for name in names:
                role = next((worker.role for worker in config.workers if worker.name == name), None)
                if role is None:
                    raise FleetError(f"worker: given {name!r}, there are {[worker.name for worker in config.workers]}")
                if role in _NEEDED and role not in left:
                    raise FleetError(f"{name}: is the last worker for {role}, without which nothing can be served")
            timeout_s = 2 * config.survival.drain_timeout_s + _RELOAD_S
            try:
                for name in names:
                    for coordinator in self._coordinators():
                        coordinator.order(f"drain {name}", timeout_s)
                self._strike_off(names)
            except (OSError, TimeoutError, ValueError) as error:
                raise FleetError(" ".join(str(error).split())) from error

    def states(self) -> list[WorkerState]:
        """Every worker as the first coordinator sees it. Raises FleetError."""
        try:
            answer = self._coordinators()[0].order("list", _LIST_S)
        except (OSError, TimeoutError, ValueError) as error:
            raise FleetError(" ".join(str(error).split())) from error
        found: list[WorkerState] = json.loads(str(answer.fields["workers"]))
        return found

    def _enlist(self, role: Role) -> str:
        """Name and ports for one more, written into the deployment's files."""
        deployment = self._deployment
        taken = {worker.name for worker in deployment.config.workers}
        number = next(n for n in range(len(taken) + 1) if f"{role}-{n}" not in taken)
        worker = self._models[role].model_copy(update={"name": f"{role}-{number}", "port": None, "kv_port": None})
        config = _with_workers(deployment.config, (*deployment.config.workers, worker))
        place = plan_worker(config, worker, deployment.ports)
        deployment.change(config, replace(deployment.topology, workers=(*deployment.topology.workers, place)))
        return worker.name

    def _start(self, names: list[str]) -> None:
        deployment = self._deployment
        others = self._workers()
        self._tell_link()
        for name in names:
            deployment.start_worker(name)
        for name in names:
            deployment.processes[name].wait_ready(deployment.config.start_timeout_s)
        for child in (*others, *(deployment.processes[name] for name in names)):  # the new ones may have read before the last was enlisted
            if child.running():
                child.order("reload", _RELOAD_S)
        for coordinator in self._coordinators():
            coordinator.order("reload", _RELOAD_S)

    def _strike_off(self, names: list[str]) -> None:
        """No longer part of the deployment: everybody forgets them, and they end."""
        deployment = self._deployment
        config = _with_workers(deployment.config, tuple(w for w in deployment.config.workers if w.name not in names))
        leaving = [place for place in deployment.topology.workers if place.name in names]
        places = tuple(place for place in deployment.topology.workers if place.name not in names)
        deployment.change(config, replace(deployment.topology, workers=places))
        for coordinator in self._coordinators():
            if coordinator.running():
                coordinator.order("reload", _RELOAD_S)
        for name in names:
            deployment.end(name)
        for child in self._workers():
            if child.running():
                child.order("reload", _RELOAD_S)
        self._tell_link()
        for place in leaving:
            release_worker(place, deployment.ports)

    def _tell_link(self) -> None:
        link = self._deployment.processes.get("link")
        if link is not None:
            link.order("reload", _RELOAD_S)
        elif proxy_ports(self._deployment.config, self._deployment.topology):
            self._deployment.start_link()

    def _workers(self) -> list[ChildProcess]:
        return [child for name, child in list(self._deployment.processes.items()) if self._deployment.is_worker(name)]

    def _coordinators(self) -> list[ChildProcess]:
        return self._deployment.own_coordinators()


def _with_workers(config: LaunchConfig, workers: tuple[WorkerConfig, ...]) -> LaunchConfig:
    """Validated as a config that is read from a file."""
    return LaunchConfig.model_validate(
        {**config.model_dump(mode="json"), "workers": [worker.model_dump(mode="json") for worker in workers]}
    )
