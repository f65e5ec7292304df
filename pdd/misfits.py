"""What of a valid launch config this machine does not have: cores, certificates, API keys. A config may be for other machines, so loading
one asks for none of it; ``pdd check`` does.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from pdd.config import LaunchConfig
from pdd.security_config import COORDINATOR, is_loopback
from pdd.serving.accounts import read_tenants


@dataclass(frozen=True)
class Misfit:
    """``line`` names the field. ``here``: whether the process in question would run on this machine, as its address is a loopback one."""

    line: str
    here: bool


def usable_cores() -> frozenset[int]:
    """Numbers of the cores that processes started from this one may run on."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(range(os.cpu_count() or 1))


def misfits(config: LaunchConfig, cores: Collection[int]) -> list[Misfit]:
    """``cores``: that this machine has. Each file once, however many processes name it."""
    found = [*_cores(config, cores), *_worker_files(config), *_door_files(config)]
    return list({misfit.line: misfit for misfit in found}.values())


def _cores(config: LaunchConfig, cores: Collection[int]) -> Iterator[Misfit]:
    for worker in config.workers:
        if worker.cpus is not None and not set(worker.cpus) <= set(cores):
            line = f"workers.{worker.name}.cpus: given {list(worker.cpus)}, this machine has {sorted(cores)}"
            yield Misfit(line, is_loopback(worker.host))


def _worker_files(config: LaunchConfig) -> Iterator[Misfit]:
    processes = [(worker.name, worker.site, worker.host) for worker in config.workers]
    for name, site, host in (*processes, (COORDINATOR, config.serving.site, config.serving.host)):
        files = config.security.worker_files(name, site)
        if files is not None:
            for field, path in (("ca", files.ca), ("cert", files.cert), ("key", files.key)):
                yield from _unreadable(f"security.{field}", path, is_loopback(host))


def _door_files(config: LaunchConfig) -> Iterator[Misfit]:
    security, here = config.security, is_loopback(config.serving.host)
    if security.door_files is not None:
        for field, path in zip(("door_cert", "door_key"), security.door_files, strict=True):
            yield from _unreadable(f"security.{field}", Path(path), here)
    if security.api_keys is not None:
        try:
            read_tenants(Path(security.api_keys))
        except ValueError as error:
            yield Misfit(str(error), here)


def _unreadable(field: str, path: Path, here: bool) -> Iterator[Misfit]:
    try:
        path.open("rb").close()
    except OSError as error:
        yield Misfit(f"{field}: cannot read {path}: {error.strerror}", here)
