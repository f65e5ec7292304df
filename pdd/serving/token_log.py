"""The token log of one request: the law. Position ``len(log)`` is accepted and nothing else, exactly once."""

from __future__ import annotations

from collections.abc import Sequence

from pddbridge.sampling_params import TokenRecord


class TokenLogError(Exception):
    """A worker proposed what cannot be: a position past the end, or another token for a position that is taken."""


class TokenLog:
    """Accepted tokens of one request, in order. ``num_duplicates``: proposals that repeated an accepted token."""

    def __init__(self) -> None:
        self._records: list[TokenRecord] = []
        self._ids: list[int] = []
        self.num_duplicates = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> Sequence[int]:
        """Accepted ids. A live view, not to be written to."""
        return self._ids

    @property
    def records(self) -> Sequence[TokenRecord]:
        """Accepted records. A live view, not to be written to."""
        return self._records

    def propose(self, position: int, record: TokenRecord) -> bool:
        """True: accepted. False: the same token stands at ``position`` already; its first record is kept.

        Raises TokenLogError for a gap or a differing token; the log is then unchanged.
        """
        if position > len(self._ids) or position < 0:
            raise TokenLogError(f"token for position {position} proposed, the log expects position {len(self._ids)}")
        if position < len(self._ids):
            if self._ids[position] != record.token_id:
                raise TokenLogError(
                    f"token {record.token_id} proposed for position {position}, the log has token {self._ids[position]} there"
                )
            self.num_duplicates += 1
            return False
        self._records.append(record)
        self._ids.append(record.token_id)
        return True
