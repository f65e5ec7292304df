"""The KV links of one worker: every link's server over the same incoming transfers, every link's sender, and the choice per push.

The coordinator says what a push may take (the route's link); the worker finds out which of it reaches the receiver. A push that takes
another link than it was to is counted and logged, with the reason.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from pdd.worker.kv_codecs import CodecChoice
from pdd.worker.link_rules import SharedLinks
from pddbridge.codecs import CodecId
from pddbridge.kv_spec import TokenRange
from pddbridge.link_schedule import Priority
from pddbridge.links.incoming import Complete, Failed, IncomingTransfers, Place
from pddbridge.links.nixl import NixlAgent, NixlSender, NixlServer
from pddbridge.links.shm import ShmSender, ShmServer
from pddbridge.links.stats import LinkStats
from pddbridge.links.tcp import Handshake, KVSender, KVServer, OutgoingTransfer, SenderCounters, SenderSettings, ServerCounters
from pddbridge.native.checksum import Checksum
from pddbridge.native.copy import Copy, plain_copy
from pddbridge.tls import LinkTls

logger = logging.getLogger(__name__)

# What a push may be told to take, and what it then tries, in order.
_PREFERENCES: Final = {"tcp": ("tcp",), "shm": ("shm", "tcp"), "nixl": ("nixl", "shm", "tcp"), "auto": ("nixl", "shm", "tcp")}
LINK_CHOICES: Final = tuple(_PREFERENCES)


@dataclass(frozen=True)
class Receiver:
    """Where the worker ``name`` receives; ``nixl_port`` 0: not over NIXL. ``epoch``: of its process, its address over shared memory."""

    name: str
    host: str
    port: int
    nixl_port: int
    epoch: int


@dataclass(frozen=True)
class LinkState:
    """A link to a receiver as it is now. ``codec``: of the latest push · ``address``: "host:port", over TCP."""

    receiver: str
    link: str
    codec: CodecId
    stats: LinkStats
    address: str = ""


class KVLinks:
    """Lives on one event loop. ``place``, ``complete``, ``failed`` as :class:`pddbridge.links.incoming.IncomingTransfers` says.
    ``nixl``: a started agent, which its owner closes after this; None: no NIXL. ``codecs``: of pushes over TCP; None: all are raw.
    ``peers``: names of the workers whose KV is taken, those of the topology; None: anyone's. ``tls``: of the TCP link; shared memory
    never leaves this host and this user. ``remote``: names of the workers of other sites, to which TCP alone may be taken.
    ``shared``: links behind which there are several of them; None: no two receivers share one. ``checksum``: CRC32C, of what goes over TCP.
    ``copy``: of frames into shared memory. ``fallbacks``: those that were made before, by reason.
    """

    def __init__(
        self,
        handshake: Handshake,
        place: Place,
        complete: Complete,
        failed: Failed,
        nixl: NixlAgent | None = None,
        codecs: CodecChoice | None = None,
        peers: Collection[str] | None = None,
        tls: LinkTls | None = None,
        remote: Collection[str] = (),
        shared: SharedLinks | None = None,
        checksum: Checksum = crc32c,
        copy: Copy = plain_copy,
        fallbacks: Mapping[str, int] | None = None,
    ) -> None:
        self._codecs = codecs or CodecChoice({}, ())
        taken = self._codecs.taken
        self._tcp_server = KVServer(handshake, place, complete, failed, codecs=taken, peers=peers, tls=tls, checksum=checksum)
        self._shm_server = ShmServer(handshake, self._tcp_server.incoming, peers=peers)
        self._nixl_server = NixlServer(handshake, self._tcp_server.incoming, nixl, peers=peers) if nixl else None
        self._shared = shared or SharedLinks()
        self._tcp = KVSender(handshake, SenderSettings(tls=tls), self._shared.rules, checksum)
        self._remote = remote
        self._shm = ShmSender(handshake, copy=copy)
        self._nixl = NixlSender(handshake, nixl) if nixl else None
        self._nixl_port = 0
        self._offered: list[str] = []
        self._receivers: dict[tuple[str, int] | int, str] = {}  # by address over TCP, by epoch within a site
        self._num_opened: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter(fallbacks)

    async def start(self, host: str, port: int) -> int:
        """Listen for frames on every link that works here; returns the TCP port. Raises OSError when TCP does not."""
        port = await self._tcp_server.start(host, port)
        self._offered.append("tcp")
        try:
            self._shm_server.start()
            self._offered.append("shm")
        except OSError as error:
            self._fall_back(f"shm: cannot receive: {error}")
        if self._nixl_server is not None:
            self._nixl_port = await self._nixl_server.start(host)
            self._offered.append("nixl")
        return port

    async def close(self) -> None:
        """Senders first: what they cancel is then told to receivers. Fences all transfers."""
        for sender in (self._nixl, self._shm, self._tcp):
            if sender is not None:
                await sender.close()
        if self._nixl_server is not None:
            await self._nixl_server.close()
        await self._shm_server.close()
        await self._tcp_server.close()

    @property
    def incoming(self) -> IncomingTransfers:
        return self._tcp_server.incoming

    @property
    def offered(self) -> tuple[str, ...]:
        """What frames may come over."""
        return tuple(self._offered)

    @property
    def nixl_port(self) -> int:
        """Where senders over NIXL connect; 0: not offered."""
        return self._nixl_port

    @property
    def num_opened(self) -> dict[str, int]:
        """Outgoing transfers by the link that was chosen, ever."""
        return dict(self._num_opened)

    @property
    def codecs_chosen(self) -> dict[str, int]:
        """Outgoing transfers over TCP by codec, ever."""
        return self._codecs.num_chosen

    @property
    def link_turns(self) -> dict[str, int]:
        """Frames on links to other sites by why their transfer had its turn, ever."""
        return self._tcp.turns

    @property
    def fallbacks(self) -> dict[str, int]:
        """By reason, ever; reads that a link copies into its slots because they could not be made there among them."""
        copied = {f"shm: a read's blocks are copied: {reason}": count for reason, count in self._shm.loans_refused.items()}
        return {**self._fallbacks, **copied}

    @property
    def server_counters(self) -> ServerCounters:
        """Of all links together."""
        tcp = self._tcp_server.counters
        others = [server.counters for server in (self._shm_server, self._nixl_server) if server is not None]
        return ServerCounters(
            tcp.bytes_received,
            tcp.wire_bytes_received,
            tcp.frames_refused + sum(other.frames_refused for other in others),
            tcp.late_frames_dropped,
            tcp.handshakes_refused + sum(other.handshakes_refused for other in others),
            tcp.num_open,
            tcp.num_connections + sum(other.num_connections for other in others),
        )

    @property
    def sender_counters(self) -> SenderCounters:
        """Of all links together."""
        return sum((sender.counters for sender in (self._tcp, self._shm, self._nixl) if sender is not None), SenderCounters())

    def states(self) -> list[LinkState]:
        """Of the links to every receiver that something was pushed to."""
        over_tcp = self._tcp.stats().items()
        found = [LinkState(self._receivers[to], "tcp", self._codecs.in_use(to), stats, f"{to[0]}:{to[1]}") for to, stats in over_tcp]
        for link, sender in (("shm", self._shm), ("nixl", self._nixl)):
            if sender is not None:
                found += [LinkState(self._receivers[epoch], link, CodecId.RAW, stats) for epoch, stats in sender.stats().items()]
        return found

    def open(
        self,
        link: str,
        receiver: Receiver,
        transfer_id: int,
        tokens: TokenRange,
        on_acked: Callable[[int], None],
        priority: Priority = Priority.NORMAL,
        deadline_s: float | None = None,
    ) -> tuple[OutgoingTransfer, CodecId]:
        """A transfer over ``link``, one of ``LINK_CHOICES``. Raises ValueError as the links' own ``open`` and for another ``link``."""
        if link not in LINK_CHOICES:
            raise ValueError(f"link: given {link!r}, allowed {list(LINK_CHOICES)}")
        if link != "tcp" and receiver.name in self._remote:
            raise ValueError(f"link: given {link!r} to {receiver.name}, which is at another site, allowed ['tcp']")
        codec = CodecId.RAW
        chosen = "tcp"
        for name in _PREFERENCES[link]:
            why_not = self._why_not(name, receiver)
            if why_not is None:
                chosen = name
                break
            if link != "auto" or self._nixl is not None or name != "nixl":  # an extra that is not installed is no fallback of "auto"
                self._fall_back(f"{name}: {why_not}")
        self._receivers[(receiver.host, receiver.port) if chosen == "tcp" else receiver.epoch] = receiver.name
        what = (receiver.epoch, transfer_id, tokens)
        if chosen == "shm":
            transfer = self._shm.open(receiver.host, receiver.port, *what, on_acked=on_acked, priority=priority)
        elif chosen == "nixl" and self._nixl is not None:
            transfer = self._nixl.open(receiver.host, receiver.nixl_port, *what, on_acked=on_acked, priority=priority)
        else:
            codec = self._codec_for(receiver)
            transfer = self._tcp.open(
                receiver.host,
                receiver.port,
                *what,
                on_acked=on_acked,
                priority=priority,
                codec=codec,
                link=self._shared.behind.get(receiver.name),
                deadline_s=deadline_s,
            )
        self._num_opened[chosen] += 1
        logger.info("transfer %d to %s:%d: asked for %s, takes %s", transfer_id, receiver.host, receiver.port, link, chosen)
        return transfer, codec

    def _codec_for(self, receiver: Receiver) -> CodecId:
        address = (receiver.host, receiver.port)
        return self._codecs.choose(address, self._tcp.stats().get(address))

    def _why_not(self, name: str, receiver: Receiver) -> str | None:
        """Why ``name`` cannot be taken; None if it can."""
        if name == "shm":
            return None if self._shm.reaches(receiver.epoch) else "the receiver is not on this host"
        if name == "nixl":
            if self._nixl is None:
                return "not here"
            if not receiver.nixl_port:
                return "not at the receiver"
            return None if self._nixl.works(receiver.epoch) else "a write has failed before"
        return None

    def _fall_back(self, reason: str) -> None:
        self._fallbacks[reason] += 1
        logger.warning("kv links: fell back; %s", reason)
