"""Who listens where, as seen from each site: the launch config with all ports decided. Written by the launcher, read by every process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pdd.roles import Role


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Route:
    """How a worker is reached from ``from_site``: the emulated link's near end where there is one, else the worker itself.

    ``kv_link``: what KV takes, as ``PushTarget.link`` says.
    """

    from_site: str
    control: Address
    kv: Address
    kv_link: str = "tcp"


@dataclass(frozen=True)
class WorkerPlace:
    """Where a worker listens (``control``: gRPC, ``kv``: frames) and how each site reaches it."""

    name: str
    role: Role
    site: str
    control: Address
    kv: Address
    routes: tuple[Route, ...]

    def route(self, from_site: str) -> Route:
        """Raises KeyError when no route from ``from_site`` was made."""
        for route in self.routes:
            if route.from_site == from_site:
                return route
        raise KeyError(f"no route from site {from_site!r} to worker {self.name!r}")


@dataclass(frozen=True)
class Topology:
    """``registry``: where workers register with the coordinator; None: they do not."""

    workers: tuple[WorkerPlace, ...]
    http: Address
    grpc: Address
    registry: Address | None = None

    def worker(self, name: str) -> WorkerPlace:
        for place in self.workers:
            if place.name == name:
                return place
        raise KeyError(f"no worker {name!r}, there are {[place.name for place in self.workers]}")

    def save(self, path: Path) -> None:
        """All at once: whoever reads it meanwhile sees the former one."""
        written = path.with_suffix(".new")
        written.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        written.replace(path)

    @staticmethod
    def load(path: Path) -> Topology:
        raw = json.loads(path.read_text(encoding="utf-8"))
        places = tuple(
            WorkerPlace(
                w["name"],
                w["role"],
                w["site"],
                Address(**w["control"]),
                Address(**w["kv"]),
                tuple(Route(r["from_site"], Address(**r["control"]), Address(**r["kv"]), r["kv_link"]) for r in w["routes"]),
            )
            for w in raw["workers"]
        )
        registry = raw.get("registry")
        return Topology(places, Address(**raw["http"]), Address(**raw["grpc"]), None if registry is None else Address(**registry))
