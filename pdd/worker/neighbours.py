"""The other workers as this one sees them: to whom it may push KV and where, from whom it takes KV, and what lies between.

All of it follows from the topology, which only the operator writes. When that changes, the parts that were handed out change in place:
who has joined is a peer from then on, who has left is none any more. Lives on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pdd.config import LaunchConfig, WorkerConfig
from pdd.roles import Role
from pdd.tls_setup import worker_link_tls
from pdd.topology import Topology
from pdd.worker.kv_codecs import Address, CodecRule, codec_rules
from pdd.worker.link_rules import SharedLinks, link_rules, shared_links
from pddbridge.tls import identity

logger = logging.getLogger(__name__)


class Neighbours:
    """``receivers``: where each receives, as seen from here, and where it listens itself, which a benchmark's yardstick takes · ``known``:
    roles by name · ``remote``: names of those at other sites · ``rules``: of codecs, by receiver's address · ``shared``: links behind
    which there are several · ``link_tls``: with the identities that peers must prove, None for plaintext.
    """

    def __init__(self, config: LaunchConfig, worker: WorkerConfig, topology: Topology, topology_file: Path | None = None) -> None:
        """``topology_file``: read again, if it has changed, when somebody is met that is not known: the coordinator may know of a worker
        before we were told. Raises ValueError where a file of certificates cannot be read.
        """
        self._config = config
        self._worker = worker
        self._file = topology_file
        self._read_at = self._version()
        self.receivers: dict[str, tuple[tuple[str, int], ...]] = _Live(self._look_again)
        self.known: dict[str, Role] = _Live(self._look_again)
        self.remote: set[str] = set()
        self.rules: dict[Address, CodecRule] = {}
        self._behind: dict[str, str] = {}
        self._identities: dict[str, str] = _Live(self._look_again)
        # Of every site, though nobody may be there yet: sending ends are made once, with the links that they will ever have.
        self.shared = SharedLinks(link_rules(config, worker.site), self._behind)
        link_tls = worker_link_tls(config, worker, {})
        self.link_tls = None if link_tls is None else replace(link_tls, peers=self._identities)
        self.apply(topology)

    def apply(self, topology: Topology) -> None:
        """From now on these, and only these, are there."""
        worker = self._worker
        known = {place.name: place.role for place in topology.workers}
        for what, names in (("joined", known.keys() - self.known.keys()), ("left", self.known.keys() - known.keys())):
            if names and self.known:
                logger.info("%s: %s", what, ", ".join(sorted(names)))
        routes = {place.name: route for place in topology.workers for route in place.routes if route.from_site == worker.site}
        listens = {place.name: place.kv for place in topology.workers}
        addresses = {name: (route.kv, listens[name]) for name, route in routes.items() if name != worker.name}
        _become(self.receivers, {name: tuple((at.host, at.port) for at in dict.fromkeys(found)) for name, found in addresses.items()})
        _become(self.known, known)
        _become(self.rules, codec_rules(self._config, topology, worker.site))
        _become(self._behind, dict(shared_links(self._config, topology, worker.site).behind))
        _become(self._identities, {name: identity(name, role) for name, role in known.items()})
        self.remote.clear()
        self.remote.update(place.name for place in topology.workers if place.site != worker.site)

    def _version(self) -> tuple[int, int] | None:
        """Of the topology's file, which is replaced as a whole; None where there is none."""
        try:
            stat = None if self._file is None else self._file.stat()
        except OSError:
            return None
        return None if stat is None else (stat.st_mtime_ns, stat.st_ino)

    def _look_again(self) -> None:
        version = self._version()
        if self._file is None or version is None or version == self._read_at:
            return
        self._read_at = version
        try:
            self.apply(Topology.load(self._file))
        except (OSError, ValueError, KeyError) as error:
            logger.error("the topology cannot be read, the former one holds: %s", error)


K = TypeVar("K")
V = TypeVar("V")


class _Live(dict[K, V]):
    """Looks again before it says that it does not know a key."""

    def __init__(self, look_again: Callable[[], None]) -> None:
        super().__init__()
        self._look_again = look_again

    def __contains__(self, key: object) -> bool:
        if not super().__contains__(key):
            self._look_again()
        return super().__contains__(key)

    def get(self, key, default=None):  # type: ignore[no-untyped-def]  # every overload of dict.get
        return super().get(key, default) if key in self else default


def _become(mine: dict[K, V], new: dict[K, V]) -> None:
    mine.clear()
    mine.update(new)
