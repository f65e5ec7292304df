"""The KV links of one worker: every link's server over the same incoming transfers, every link's sender, and the choice per push.

The coordinator says what a push may take (the route's link); the worker finds out whether the receiver can be reached that way. Whoever
cannot be reached over shared memory gets TCP, which is counted and logged.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

from pddbridge.kv_spec import TokenRange
from pddbridge.links.incoming import Complete, Failed, IncomingTransfers, Place
from pddbridge.links.shm import ShmSender, ShmServer
from pddbridge.links.tcp import Handshake, KVSender, KVServer, OutgoingTransfer, SenderCounters, ServerCounters

logger = logging.getLogger(__name__)

LINK_CHOICES: Final = ("auto", "tcp", "shm")


class KVLinks:
    """Lives on one event loop. ``place``, ``complete``, ``failed`` as :class:`pddbridge.links.incoming.IncomingTransfers` says."""

    def __init__(self, handshake: Handshake, place: Place, complete: Complete, failed: Failed) -> None:
        self._tcp_server = KVServer(handshake, place, complete, failed)
        self._shm_server = ShmServer(handshake, self._tcp_server.incoming)
        self._tcp = KVSender(handshake)
        self._shm = ShmSender(handshake)
        self._offered: tuple[str, ...] = ()
        self._num_opened: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()

    async def start(self, host: str, port: int) -> int:
        """Listen for frames on every link that works here; returns the TCP port. Raises OSError when TCP does not."""
        port = await self._tcp_server.start(host, port)
        self._offered = ("tcp",)
        try:
            self._shm_server.start()
            self._offered = ("shm", "tcp")
        except OSError as error:
            self._fall_back(f"shm: cannot receive: {error}")
        return port

    async def close(self) -> None:
        """Senders first: what they cancel is then told to receivers. Fences all transfers."""
        await self._shm.close()
        await self._tcp.close()
        await self._shm_server.close()
        await self._tcp_server.close()

    @property
    def incoming(self) -> IncomingTransfers:
        return self._tcp_server.incoming

    @property
    def offered(self) -> tuple[str, ...]:
        """What frames may come over."""
        return self._offered

    @property
    def num_opened(self) -> dict[str, int]:
        """Outgoing transfers by the link that was chosen, ever."""
        return dict(self._num_opened)

    @property
    def fallbacks(self) -> dict[str, int]:
        """By reason, ever."""
        return dict(self._fallbacks)

    @property
    def server_counters(self) -> ServerCounters:
        """Of all links together."""
        tcp, shm = self._tcp_server.counters, self._shm_server.counters
        return ServerCounters(
            tcp.bytes_received,
            tcp.frames_refused + shm.frames_refused,
            tcp.late_frames_dropped,
            tcp.handshakes_refused + shm.handshakes_refused,
            tcp.num_open,
            tcp.num_connections + shm.num_connections,
        )

    @property
    def sender_counters(self) -> SenderCounters:
        """Of all links together."""
        tcp, shm = self._tcp.counters, self._shm.counters
        return SenderCounters(
            tcp.bytes_sent + shm.bytes_sent,
            tcp.frames_resent + shm.frames_resent,
            tcp.connections_opened + shm.connections_opened,
            tcp.num_open + shm.num_open,
        )

    def open(
        self, link: str, host: str, port: int, epoch: int, transfer_id: int, tokens: TokenRange, on_acked: Callable[[int], None]
    ) -> OutgoingTransfer:
        """A transfer over ``link``, one of ``LINK_CHOICES``. Raises ValueError as the links' own ``open`` and for another ``link``."""
        if link not in LINK_CHOICES:
            raise ValueError(f"link: given {link!r}, allowed {list(LINK_CHOICES)}")
        sender: KVSender | ShmSender = self._tcp
        if link != "tcp":
            if self._shm.reaches(epoch):
                sender = self._shm
            else:
                self._fall_back("shm: the receiver is not on this host")
        transfer = sender.open(host, port, epoch, transfer_id, tokens, on_acked=on_acked)
        chosen = "shm" if sender is self._shm else "tcp"
        self._num_opened[chosen] += 1
        logger.info("transfer %d to %s:%d: asked for %s, takes %s", transfer_id, host, port, link, chosen)
        return transfer

    def _fall_back(self, reason: str) -> None:
        self._fallbacks[reason] += 1
        logger.warning("kv links: tcp instead of %s", reason)
