"""Prompt and log of one request on a worker, as one growing int32 array that is appended to and never overwritten: views stay true."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TokenSequence:
    """``view`` gives slices of the array itself, without a copy: decoding a long prompt must not cost its length at every step."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._length = len(token_ids)
        self._array = np.empty(max(64, 2 * self._length), dtype=np.int32)
        self._array[: self._length] = token_ids

    def __len__(self) -> int:
        return self._length

    def append(self, token_id: int) -> None:
        if self._length == len(self._array):
            grown = np.empty(2 * self._length, dtype=np.int32)
            grown[: self._length] = self._array
            self._array = grown
        self._array[self._length] = token_id
        self._length += 1

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on. Views that were given out keep what they showed."""
        assert 0 <= length <= self._length, (length, self._length)
        kept = np.empty_like(self._array)
        kept[:length] = self._array[:length]
        self._array, self._length = kept, length

    def view(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``[start, stop)`` as i32, read-only."""
        assert 0 <= start <= stop <= self._length, (start, stop, self._length)
        view = self._array[start:stop]
        view.flags.writeable = False
        return view
