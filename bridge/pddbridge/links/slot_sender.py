"""The sending end of a slot link in one process: transfers to any number of receivers."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from pddbridge.kv_handshake import Handshake
from pddbridge.kv_sender import Sender
from pddbridge.kv_spec import HeadRange, TokenRange
from pddbridge.kv_wire import sampled_crc32c
from pddbridge.links.outgoing import OutgoingTransfer
from pddbridge.links.schedule import Priority
from pddbridge.links.slot_loans import SlotLoans
from pddbridge.links.slot_peer import Carrier, SlotPeer, SlotSettings
from pddbridge.links.slots import SLOT_BYTES
from pddbridge.links.stats import LinkStats, SenderCounters


class SlotSender(ABC):
    """As :class:`pddbridge.links.tcp.KVSender`. ``lends``: blocks may be made in the link's memory."""

    lends: ClassVar[bool] = False

    def __init__(self, handshake: Handshake, settings: SlotSettings | None = None) -> None:
        self._handshake = handshake
        self._settings = settings or SlotSettings()
        self._peers: dict[int, SlotPeer] = {}
        self._past = SenderCounters()
        self._past_refused: Counter[str] = Counter()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def counters(self) -> SenderCounters:
        return sum((peer.counters for peer in self._peers.values()), self._past)

    @property
    def loans_refused(self) -> dict[str, int]:
        """Reads whose blocks could not be made in a slot and are copied into one, by reason."""
        return dict(sum((peer.lender.refused for peer in self._peers.values()), self._past_refused))

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
    ) -> OutgoingTransfer:
        """A transfer of ``tokens`` to the receiver with ``receiver_epoch`` at ``host:port``; ``heads`` (absolute): only this shard's.

        ``on_acked`` as :class:`OutgoingTransfer` says. Call on the event loop; the connection is opened at once, so that a receiver that is
        gone is noticed early. Raises ValueError for an empty range or an id in use.
        """
        self._retire(receiver_epoch)
        peer = self._peers.get(receiver_epoch)
        if peer is None:
            connect = partial(self._connect, host, port, receiver_epoch)
            peer = SlotPeer(receiver_epoch, connect, self._settings, partial(self._unprepare, receiver_epoch))
            peer.lender.loans = self._lends_at_once(receiver_epoch)
        lend = peer.lender.lend if self.lends else None
        max_attempts = self._settings.max_attempts
        machine = Sender(
            self._handshake.kv_spec,
            transfer_id,
            receiver_epoch,
            tokens,
            heads,
            max_attempts,
            sampled_crc32c,
            max_frame_bytes=SLOT_BYTES,
        )
        transfer = OutgoingTransfer(machine, peer.offer, self._settings.stall_timeout_s, on_acked, peer.stopped, priority, lend)
        peer.add(transfer)
        self._peers[receiver_epoch] = peer
        return transfer

    def connected(self, epoch: int) -> bool:
        """Whether a connection to the receiver with ``epoch`` stands."""
        return (peer := self._peers.get(epoch)) is not None and peer.connected

    def stats(self) -> dict[int, LinkStats]:
        """What is known of the link to each receiver, by its epoch."""
        return {epoch: peer.stats for epoch, peer in self._peers.items()}

    async def close(self) -> None:
        """Cancel live transfers, close connections."""
        await asyncio.gather(*(peer.close() for peer in self._peers.values()), *self._closing)

    @abstractmethod
    async def _connect(self, host: str, port: int, epoch: int) -> Carrier:
        """A new connection to that receiver, the handshake done. Raises HandshakeError, WireError or OSError."""

    def _lends_at_once(self, epoch: int) -> SlotLoans | None:
        """Memory of the connection that will be made to that receiver, where it is there before the connection is."""
        return None

    def _unprepare(self, epoch: int) -> None:
        """Let go of that memory: the connection will not be made."""
        return

    def _retire(self, receiver_epoch: int) -> None:
        """Forget receivers that are gone: nothing is sent to them any more and their connection has ended."""
        for epoch in [e for e, peer in self._peers.items() if e != receiver_epoch and not peer.num_live and not peer.connected]:
            peer = self._peers.pop(epoch)
            self._past += peer.counters
            self._past_refused += peer.lender.refused
            task = asyncio.get_running_loop().create_task(peer.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
