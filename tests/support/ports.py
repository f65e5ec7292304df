"""What a deployment's processes listen on, by the kernel's own tables, and what somebody may throw at it."""

from __future__ import annotations

import contextlib
import pickle
import socket
from pathlib import Path

import psutil

from pdd.launch.local import Deployment


class _Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def bomb(path: Path) -> bytes:
    """A pickle that makes ``path``, tried."""
    data = pickle.dumps(_Bomb(path))
    pickle.loads(data)
    assert path.exists(), "the bomb does not work"
    path.unlink()
    return data


def listening(deployment: Deployment) -> set[tuple[str, int]]:
    """Addresses that the processes listen on; IPv4 ones on IPv6 sockets as IPv4."""
    found = set()
    for process in deployment.processes.values():
        for connection in psutil.Process(process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.add((connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port))
    return found


def configured(deployment: Deployment) -> set[tuple[str, int]]:
    """What the topology says, proxies of emulated links included."""
    topology = deployment.topology
    ours = {(a.host, a.port) for p in topology.workers for a in (p.control, p.kv)}
    ours |= {(a.host, a.port) for p in topology.workers for r in p.routes for a in (r.control, r.kv)}
    return ours | {(a.host, a.port) for a in (topology.http, topology.grpc, topology.registry) if a is not None}


def assert_only_configured(deployment: Deployment, more_per_worker: int = 0) -> None:
    """All on loopback, and only on what the topology says. ``more_per_worker``: ports of links within a site that it does not know."""
    ours, found = configured(deployment), listening(deployment)
    assert {host for host, _ in found} == {"127.0.0.1"}, found
    assert ours <= found
    assert len(found - ours) <= more_per_worker * len(deployment.topology.workers), found - ours


def throw_everywhere(deployment: Deployment, data: bytes) -> None:
    """Send ``data`` to every port that is listened on; returns when all of ours have hung up. Those of a library need not."""
    ours = configured(deployment)
    for where in sorted(listening(deployment)):
        with socket.create_connection(where, timeout=15 if where in ours else 1) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError, *(() if where in ours else (TimeoutError,))):
                while sock.recv(4096):
                    pass
