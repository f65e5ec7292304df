"""The few static shapes that steps are padded to. Fewer buckets compile faster, more waste less; the numbers here are that balance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KV_TOKENS: Final = 128  # of one read_kv or write_kv piece; longer ranges are cut
_GROWTH: Final = 4
_SMALLEST_RAGGED: Final = 16


@dataclass(frozen=True)
class Buckets:
    """``rows``: R of a decode-only step, and of sampling rows · ``tokens``: T of any other step. Ascending, the last is the limit."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    @staticmethod
    def up_to(max_rows: int, max_step_tokens: int) -> Buckets:
        """Sizes grow four times from bucket to bucket. Padded rows are nearly free (a step reads the weights once), padded tokens are not,
        but each bucket of a 30-layer model costs 3 to 6 CPU-seconds of compiling.
        """
        return Buckets(_growing(1, max_rows), _growing(_SMALLEST_RAGGED, max_step_tokens))


def pick(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket that holds ``size``."""
    return next(bucket for bucket in buckets if bucket >= size)


def _growing(first: int, last: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= _GROWTH
    return (*sizes, last)
