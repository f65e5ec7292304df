"""The sending end of the TCP link in one process: transfers to any number of receivers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

from crc32c import crc32c

from pddbridge.codecs import CodecId
from pddbridge.kv_handshake import Handshake
from pddbridge.kv_sender import Sender
from pddbridge.kv_spec import HeadRange, TokenRange
from pddbridge.links.coding import CodingThreads
from pddbridge.links.outgoing import OutgoingTransfer
from pddbridge.links.schedule import LinkRules, Priority
from pddbridge.links.shared_link import SharedLink, frame_bytes
from pddbridge.links.stats import LinkStats, SenderCounters
from pddbridge.links.tcp_peer import Peer, SenderSettings
from pddbridge.native.checksum import Checksum


class KVSender:
    """Sends KV from one process. Connections to a receiver are kept between transfers and opened again when broken. ``links``: the rules of
    links that several receivers share, by name; a receiver that is not said to be behind one has a link of its own. ``checksum``: of raw
    payloads, CRC32C.
    """

    def __init__(
        self,
        handshake: Handshake,
        settings: SenderSettings | None = None,
        links: Mapping[str, LinkRules] | None = None,
        checksum: Checksum = crc32c,
    ) -> None:
        self._handshake = handshake
        self._settings = settings or SenderSettings()
        self._checksum = checksum
        self._links = {name: SharedLink(rules) for name, rules in (links or {}).items()}
        self._peers: dict[tuple[str, int, int], Peer] = {}
        self._retired = SenderCounters()
        self._coding = CodingThreads()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def counters(self) -> SenderCounters:
        return sum((peer.counters for peer in self._peers.values()), self._retired)

    @property
    def turns(self) -> dict[str, int]:
        """Frames on shared links by the reason for which their transfer had its turn, ever."""
        found: Counter[str] = Counter()
        for link in self._links.values():
            found.update(link.num_taken)
        return dict(found)

    def open(
        self,
        host: str,
        port: int,
        receiver_epoch: int,
        transfer_id: int,
        tokens: TokenRange,
        heads: HeadRange | None = None,
        on_acked: Callable[[int], None] | None = None,
        *,
        priority: Priority = Priority.NORMAL,
        resume: bool = False,
        codec: CodecId | None = None,
        link: str | None = None,
        deadline_s: float | None = None,
    ) -> OutgoingTransfer:
        """A transfer of ``tokens`` to the receiver with ``receiver_epoch`` at ``host:port``; ``heads`` (absolute): only this shard's.

        ``on_acked`` as :class:`OutgoingTransfer` says. ``resume``: another process may have sent a part, so the receiver is asked first
        what it has. ``codec``: None for the settings'; where the receiver does not take it, a lossless one gives way to raw and a lossy one
        fails the transfer. ``link``: the shared link that the receiver is behind. ``deadline_s``: from now, for links that go by deadlines.
        Call on the event loop; connections are opened at once, so that the first ``push`` finds them warm and a receiver that has restarted
        is noticed early.
        Raises ValueError for an empty range, an id in use or a link without rules.
        """
        self._retire(host, port, receiver_epoch)
        key = (host, port, receiver_epoch)
        if link is not None and link not in self._links:
            raise ValueError(f"link: given {link!r}, allowed {sorted(self._links)}")
        shared = None if link is None else self._links[link]
        peer = self._peers.get(key) or Peer(self._handshake, host, port, receiver_epoch, self._settings, self._coding, shared)
        spec, settings = self._handshake.kv_spec, self._settings
        codec = settings.codec if codec is None else codec
        largest = frame_bytes(peer.wire_bytes_s, peer.max_payload_bytes)
        machine = Sender(
            spec,
            transfer_id,
            receiver_epoch,
            tokens,
            heads,
            settings.max_attempts,
            lambda payload: self._checksum(payload, 0),
            resume,
            codec,
            largest,
        )
        due_s = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        transfer = OutgoingTransfer(machine, peer.offer, settings.stall_timeout_s, on_acked, peer.stopped, priority, deadline_s=due_s)
        peer.add(transfer)
        self._peers[key] = peer
        return transfer

    def stats(self) -> dict[tuple[str, int], LinkStats]:
        """What is known of the link to each receiver, by host and port; of an earlier life of a receiver only while it has transfers."""
        newest_last = sorted(self._peers.items(), key=lambda item: item[1].num_live > 0)
        return {(host, port): peer.stats for (host, port, _), peer in newest_last}

    async def close(self) -> None:
        """Cancel live transfers, close connections."""
        await asyncio.gather(*(peer.close() for peer in self._peers.values()), *self._closing)
        self._coding.close()

    def _retire(self, host: str, port: int, epoch: int) -> None:
        """Forget earlier lives of the receiver at ``host:port`` that nothing is sent to any more."""
        for key in [k for k in self._peers if k[:2] == (host, port) and k[2] != epoch and not self._peers[k].num_live]:
            peer = self._peers.pop(key)
            self._retired += peer.counters
            task = asyncio.get_running_loop().create_task(peer.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
