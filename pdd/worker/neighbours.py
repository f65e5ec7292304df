"""The other workers as this one sees them: to whom it may push KV and where, from whom it takes KV, and what lies between.

All of it follows from the topology, which only the operator writes. When that changes, the parts that were handed out change in place:
who has joined is a peer from then on, who has left is none any more. Lives on the event loop.
"""

from __future__ import annotations

import logging
from dataclasses import replace
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
    """``receivers``: where each receives, as seen from here · ``known``: roles by name · ``remote``: names of those at other sites ·
    ``rules``: of codecs, by receiver's address · ``shared``: links behind which there are several · ``link_tls``: with the identities that
    peers must prove, None for plaintext.
    """

    def __init__(self, config: LaunchConfig, worker: WorkerConfig, topology: Topology) -> None:
        """Raises ValueError where a file of certificates cannot be read."""
        self._config = config
        self._worker = worker
        self.receivers: dict[str, tuple[str, int]] = {}
        self.known: dict[str, Role] = {}
        self.remote: set[str] = set()
        self.rules: dict[Address, CodecRule] = {}
        self._behind: dict[str, str] = {}
        self._identities: dict[str, str] = {}
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
        _become(self.receivers, {name: (route.kv.host, route.kv.port) for name, route in routes.items() if name != worker.name})
        _become(self.known, known)
        _become(self.rules, codec_rules(self._config, topology, worker.site))
        _become(self._behind, dict(shared_links(self._config, topology, worker.site).behind))
        _become(self._identities, {name: identity(name, role) for name, role in known.items()})
        self.remote.clear()
        self.remote.update(place.name for place in topology.workers if place.site != worker.site)


K = TypeVar("K")
V = TypeVar("V")


def _become(mine: dict[K, V], new: dict[K, V]) -> None:
    mine.clear()
    mine.update(new)
