"""Ports of a launch, kept from everybody else between being picked and being listened on, and while their process is started again."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable

from pdd.topology import Address

# They lie below what kernels give to outgoing connections (Linux: from 32768, IANA: from 49152), or one of those could have them.
PICKED_PORTS = range(20000, 32000)
_PICK_ATTEMPTS = 100


class HeldPorts:
    """Every port is bound and not listened on, until ``release``. On Linux whoever says SO_REUSEADDR may listen there all the same, as
    every process of a deployment does; whoever looks for a free port as ``take`` does finds it taken, and so does any plain bind.
    """

    def __init__(self) -> None:
        self._held: dict[Address, socket.socket] = {}

    def __enter__(self) -> HeldPorts:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self, host: str, port: int | None, field: str) -> Address:
        """``port`` None: a free one is picked. Raises ValueError naming ``field`` when ``port`` is taken, or was by an earlier call."""
        picked = port is None
        refused: str | None = None
        for candidate in random.sample(PICKED_PORTS, min(len(PICKED_PORTS), _PICK_ATTEMPTS)) if port is None else [port]:
            try:
                self._hold(host, candidate, picked)
            except OSError as error:
                refused = error.strerror or str(error)
                continue
            return Address(host, candidate)
        raise ValueError(f"{field}: cannot listen on {host}:{port or 'any port'}: {refused}")

    def release(self, addresses: Iterable[Address] | None = None) -> None:
        """Let go of ``addresses``, as far as they are held; None: of all."""
        for address in list(self._held) if addresses is None else addresses:
            held = self._held.pop(address, None)
            if held is not None:
                held.close()

    def _hold(self, host: str, port: int, picked: bool) -> None:
        """A configured port may have connections of its last owner that are not forgotten yet; for a picked one there are others."""
        bound = socket.socket()
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, not picked)
            bound.bind((host, port))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
            if bound.getsockname() in [held.getsockname() for held in self._held.values()]:
                raise OSError(f"port {port} is given twice")
        except OSError:
            bound.close()
            raise
        self._held[Address(host, port)] = bound
