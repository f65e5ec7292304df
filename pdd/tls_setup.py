"""From the section ``security`` of a launch config to what servers, channels and KV links are given. Reads the files that it names: it is
for composition roots."""

from __future__ import annotations

from pathlib import Path

from pdd.config import LaunchConfig, WorkerConfig
from pdd.roles import Role
from pdd.security_config import COORDINATOR, SecurityConfig
from pdd.topology import WorkerPlace
from pddbridge.rpc.channel import ChannelTls
from pddbridge.rpc.peers import PeerGuard
from pddbridge.tls import LinkTls, RpcTls, identity

COORDINATOR_IDENTITY = identity(COORDINATOR, COORDINATOR)


def worker_rpc_tls(config: LaunchConfig, worker: WorkerConfig) -> RpcTls | None:
    """For the control port of ``worker``; None: plaintext. Raises ValueError naming a file that is missing or does not fit."""
    files = config.security.worker_files(worker.name, worker.site)
    return None if files is None else RpcTls.load(files)


def worker_guards(config: LaunchConfig, worker: WorkerConfig) -> tuple[PeerGuard, ...]:
    """What stands before its services: under TLS only the coordinator may call them."""
    if config.security.worker_tls == "off":
        return ()
    return (PeerGuard(identity(worker.name, worker.role), lambda: (COORDINATOR_IDENTITY,)),)


def worker_link_tls(config: LaunchConfig, worker: WorkerConfig, peers: dict[str, Role]) -> LinkTls | None:
    """For its KV port and its pushes. ``peers``: roles by the names of the workers that the topology knows. Raises as
    :func:`worker_rpc_tls`."""
    files = config.security.worker_files(worker.name, worker.site)
    return None if files is None else LinkTls.load(files, {name: identity(name, role) for name, role in peers.items()})


def coordinator_rpc_tls(config: LaunchConfig) -> RpcTls | None:
    """For the coordinator's calls of workers. Raises as :func:`worker_rpc_tls`."""
    files = config.security.worker_files(COORDINATOR, config.serving.site)
    return None if files is None else RpcTls.load(files)


def to_worker(tls: RpcTls | None, place: WorkerPlace) -> ChannelTls | None:
    """For a channel to the worker at ``place``, which must prove its name and role."""
    return None if tls is None else ChannelTls(tls, identity(place.name, place.role))


def to_coordinator(tls: RpcTls | None) -> ChannelTls | None:
    """For a worker's channel to the coordinator's registry. ``tls``: the worker's own."""
    return None if tls is None else ChannelTls(tls, COORDINATOR_IDENTITY)


def door_tls(security: SecurityConfig) -> RpcTls | None:
    """For the front doors, which ask clients for keys and not for certificates; None: plaintext. Raises ValueError naming a file."""
    if security.door_files is None:
        return None
    found = []
    for field, path in zip(("door_cert", "door_key"), security.door_files, strict=True):
        try:
            found.append(Path(path).read_bytes())
        except OSError as error:
            raise ValueError(f"security.{field}: cannot read {path}: {error.strerror}") from error
    return RpcTls(None, found[0], found[1])
