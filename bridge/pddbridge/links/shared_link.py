"""One wide-area link as a sending process sees it: the transfers to all receivers behind it take turns, whichever connection carries them.

A connection asks before every frame. It may go when the transfer whose turn it is, of all that wait on the link, is one of its receiver's;
else it waits for the other receiver's connections, which are busy as long as the link is. Those that bring nothing across (no connection,
nothing acknowledged for a second) are not waited for, and nobody waits longer than a few frames take, so the link is never idle while
anything could go.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Final, Protocol

from pddbridge.kv_wire import LARGEST_PAYLOAD_BYTES
from pddbridge.link_schedule import LinkRules, TurnReason
from pddbridge.links.outgoing import OutgoingTransfer
from pddbridge.links.schedule import Turns

# A frame that starts is not interrupted, so on a slow link it is cut to what crosses in this time.
_FRAME_S: Final = 0.025
_MIN_FRAME_BYTES: Final = 32 * 1024
_UNMEASURED_FRAME_BYTES: Final = 256 * 1024
# What a socket holds that has not left: the same time for all connections, so that what is chosen leaves soon.
_MIN_UNSENT_BYTES: Final = 64 * 1024
_MAX_UNSENT_BYTES: Final = 8 << 20
_PATIENCE_FRAMES: Final = 4
_UNMEASURED_PATIENCE_S: Final = 0.1
_STALLED_AFTER_S: Final = 1.0


def frame_bytes(wire_bytes_s: float | None, most: int = LARGEST_PAYLOAD_BYTES) -> int:
    """How large frames may be on a link of this measured rate, to a receiver that takes ``most``; None: not measured."""
    if wire_bytes_s is None:
        return _UNMEASURED_FRAME_BYTES
    return int(min(most, max(_MIN_FRAME_BYTES, wire_bytes_s * _FRAME_S)))


def unsent_bytes(wire_bytes_s: float | None) -> int:
    """What a connection's socket may hold unsent, rounded down to a power of two so that it is seldom set anew. Much on a fast link, where
    waking the sender for every few hundred KiB costs a tenth of its speed.
    """
    wanted = _UNMEASURED_FRAME_BYTES if wire_bytes_s is None else wire_bytes_s * _FRAME_S
    return 1 << (int(min(_MAX_UNSENT_BYTES, max(_MIN_UNSENT_BYTES, wanted))).bit_length() - 1)


class Member(Protocol):
    """One receiver behind the link. ``progressed_at_s``: when a frame was last acknowledged, or the first of those in flight sent."""

    progressed_at_s: float

    @property
    def num_connections(self) -> int: ...

    @property
    def num_in_flight(self) -> int: ...

    @property
    def wire_bytes_s(self) -> float | None: ...


class SharedLink:
    """Lives on one event loop."""

    def __init__(self, rules: LinkRules | None = None) -> None:
        self._turns: Turns[OutgoingTransfer] = Turns(rules)
        self._owners: dict[OutgoingTransfer, Member] = {}
        self._num_waiting: Counter[Member] = Counter()
        self._taken_at_s = 0.0
        self._changed = asyncio.Event()

    @property
    def num_taken(self) -> Mapping[TurnReason, int]:
        """Frames by the reason for which their transfer had its turn, ever."""
        return self._turns.num_taken

    def waits(self, member: Member) -> bool:
        """Whether some transfer of ``member`` has a frame to send."""
        return self._num_waiting[member] > 0

    def offer(self, member: Member, transfer: OutgoingTransfer, now_s: float) -> None:
        """``transfer`` has frames to send; no effect if that is known."""
        if transfer not in self._owners:
            self._owners[transfer] = member
            self._num_waiting[member] += 1
            self._turns.add(transfer, now_s)
        self.wake()

    def forget(self, member: Member) -> None:
        """Nothing of ``member`` waits any more."""
        self._turns.remove(lambda transfer: self._owners[transfer] is member)
        self._owners = {transfer: owner for transfer, owner in self._owners.items() if owner is not member}
        del self._num_waiting[member]
        self.wake()

    def may_send(self, member: Member, now_s: float) -> bool:
        """Whether a connection of ``member`` may send a frame now."""
        if len(self._num_waiting) == 1:
            return True
        chosen = self._turns.next(now_s, lambda transfer: self._counts(transfer, member, now_s))
        if chosen is None or self._owners[chosen] is member:
            return True
        return now_s - self._taken_at_s > self._patience_s(self._owners[chosen])

    def take(self, member: Member, now_s: float) -> OutgoingTransfer | None:
        """Which transfer of ``member`` sends now; it does not wait any more until it is offered again."""
        chosen = self._turns.take(now_s, lambda transfer: self._owners[transfer] is member)
        if chosen is not None:
            del self._owners[chosen]
            self._num_waiting[member] -= 1
            if not self._num_waiting[member]:
                del self._num_waiting[member]
            self._taken_at_s = now_s
            self.wake()
        return chosen

    def wake(self) -> None:
        """Whoever waits for its turn looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, limit_s: float) -> None:
        """Returns at the next change, or after ``limit_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._changed.wait()

    def _counts(self, transfer: OutgoingTransfer, asking: Member, now_s: float) -> bool:
        """Whether ``asking`` would wait for ``transfer``."""
        owner = self._owners[transfer]
        if owner is asking:
            return True
        stalled = owner.num_in_flight > 0 and now_s - owner.progressed_at_s > _STALLED_AFTER_S
        return transfer.num_queued > 0 and owner.num_connections > 0 and not stalled

    @staticmethod
    def _patience_s(member: Member) -> float:
        rate = member.wire_bytes_s
        return _UNMEASURED_PATIENCE_S if not rate else min(_STALLED_AFTER_S, max(0.02, _PATIENCE_FRAMES * frame_bytes(rate) / rate))
