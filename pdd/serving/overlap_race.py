"""Two workers propose for one log: which proposals count, and how far main is behind. Owns no log and no clock."""

from __future__ import annotations

from collections.abc import Sequence

# So many of main's latest delays count, the worst of them.
_LATEST = 3
# Of a main that nothing is known of, one may have been lucky.
_ENOUGH = 2


class OverlapRace:
    """From the moment main is told to decode while the relay does, until main is first or lost. All times are of one monotonic clock.

    ``num_duplicates``: main's proposals that the relay was first with · ``num_rewinds``: those that differed, each time main is rewound ·
    ``delays_s``: from the acceptance of a token to main's proposal of the next, whoever was first with that; but for the first of all,
    for which main had to read what it was given.
    """

    def __init__(self, log_tokens: int, now_s: float) -> None:
        self.num_duplicates = 0
        self.num_rewinds = 0
        self.delays_s: list[float] = []
        self._start = log_tokens
        self._accepted_s = [now_s]  # of positions from start - 1 on; main could not know that one before now
        self._last_proposal_s = now_s
        self._left_at: int | None = None
        self._has_read = False

    @property
    def num_relayed(self) -> int:
        """Tokens that were accepted since the race began."""
        return len(self._accepted_s) - 1

    def accepted(self, now_s: float) -> None:
        """The relay's proposal for the next position was accepted."""
        self._accepted_s.append(now_s)

    def counts(self, position: int, token_id: int, log_ids: Sequence[int], now_s: float) -> bool:
        """Whether main's proposal may be offered to the log. One that differs takes main off the log, and what it proposes next rests on
        the token that lost: nothing of it counts until main says that it was given the log beyond (:meth:`ingested`).
        """
        if self._left_at is not None:
            return False
        if self._has_read and self._start <= position <= len(log_ids):
            self.delays_s.append(now_s - self._accepted_s[position - self._start])
        self._has_read = True
        if position >= len(log_ids):
            return True
        self._last_proposal_s = now_s
        if log_ids[position] != token_id:
            self._left_at = position
            self.num_rewinds += 1
            return False
        self.num_duplicates += 1
        return True

    def ingested(self, length: int) -> None:
        """Main's log is the log up to ``length``, and so is what it proposes from now on."""
        if self._left_at is not None and length > self._left_at:
            self._left_at = None

    def delay_s(self, now_s: float, is_known: bool) -> float | None:
        """From the acceptance of a token to main's proposal of the next: the worst of late. A main that has fallen silent is at least as
        late as that lasts. None before there are two; where main ``is_known``, before there is one.
        """
        if len(self.delays_s) < (1 if is_known else _ENOUGH):
            return None
        return max(*self.delays_s[-_LATEST:], now_s - self._last_proposal_s)
