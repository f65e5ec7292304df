"""What a prefill worker reads next for whom. Owns one cursor per receiver; pure bookkeeping, it reads nothing itself.

Each receiver has its own window of unacknowledged bytes, so a slow link never holds up a fast one, and host memory stays bounded
however far prefill is ahead. Receivers that stand at the same position share one read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pddbridge.kv_spec import TokenRange
from pddbridge.links.slot_loans import Lend


@dataclass(frozen=True)
class PushRead:
    """Read ``tokens`` once, send them to all ``targets``. ``lend``: of a link that carries them; None: no link has memory to lend."""

    tokens: TokenRange
    targets: tuple[str, ...]
    lend: Lend | None = None


@dataclass
class _Cursor:
    target: str
    next_token: int
    unacked_bytes: int = 0


class PushFeed:
    """``targets``: (name, first position) · ``stop``: first position not sent · ``window_bytes``: unacknowledged bytes per receiver ·
    ``piece_bytes``: about how much one read copies · ``lenders``: of the targets whose link lends memory.
    """

    def __init__(
        self,
        targets: Sequence[tuple[str, int]],
        stop: int,
        bytes_per_token: int,
        window_bytes: int,
        piece_bytes: int,
        lenders: Mapping[str, Lend] | None = None,
    ) -> None:
        self._lenders = dict(lenders or {})
        self._stop = stop
        self._bytes_per_token = bytes_per_token
        self._window_bytes = window_bytes
        self._piece_tokens = max(1, piece_bytes // bytes_per_token)
        self._cursors = {name: _Cursor(name, first) for name, first in targets if first < stop}

    def add(self, target: str, first_token: int, lend: Lend | None = None) -> None:
        """One more receiver. Raises ValueError for one that is there."""
        if target in self._cursors:
            raise ValueError(f"target: {target!r} is pushed to already")
        if first_token < self._stop:
            self._cursors[target] = _Cursor(target, first_token)
            if lend is not None:
                self._lenders[target] = lend

    @property
    def finished(self) -> bool:
        """Whether nothing more is to be read."""
        return all(cursor.next_token >= self._stop for cursor in self._cursors.values())

    def next_read(self, kv_len: int) -> PushRead | None:
        """The next piece of ``[.., kv_len)`` that some receiver has room for, unacknowledged from now on; None when there is none."""
        end = min(kv_len, self._stop)
        open_cursors = [c for c in self._cursors.values() if c.next_token < end and c.unacked_bytes < self._window_bytes]
        if not open_cursors:
            return None
        start = min(c.next_token for c in open_cursors)
        group = [c for c in open_cursors if c.next_token == start]
        ahead = [c.next_token for c in open_cursors if c.next_token > start]
        stop = min([end, start + self._piece_tokens, *ahead])
        for cursor in group:
            cursor.next_token = stop
            cursor.unacked_bytes += (stop - start) * self._bytes_per_token
        names = tuple(c.target for c in group)
        return PushRead(TokenRange(start, stop), names, next((self._lenders[name] for name in names if name in self._lenders), None))

    def acknowledge(self, target: str, num_bytes: int) -> None:
        """``target`` has placed ``num_bytes`` more."""
        if cursor := self._cursors.get(target):
            cursor.unacked_bytes = max(0, cursor.unacked_bytes - num_bytes)

    def end(self, target: str) -> None:
        """Read nothing more for ``target``."""
        self._cursors.pop(target, None)
