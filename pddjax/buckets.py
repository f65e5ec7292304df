"""The few static shapes that steps are padded to. Fewer buckets compile faster, more waste less; the numbers here are that balance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KV_TOKENS: Final = 128  # of one read_kv or write_kv piece; longer ranges are cut
_FEW_ROWS: Final = 4
_SMALLEST_RAGGED: Final = 16


@dataclass(frozen=True)
class Buckets:
    """``rows``: R of a decode-only step, and of sampling rows · ``tokens``: T of any other step. Ascending, the last is the limit."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    @staticmethod
    def up_to(max_rows: int, max_step_tokens: int) -> Buckets:
        """Tokens grow four times from bucket to bucket, rows twice from 4 on: a CPU's products with 16 columns take half as long again as
        with 8. Each bucket of a 30-layer model costs 1 to 6 CPU-seconds of compiling.
        """
        rows = (1, *_growing(_FEW_ROWS, max_rows, 2)) if max_rows > 1 else (1,)
        return Buckets(rows, _growing(_SMALLEST_RAGGED, max_step_tokens, 4))


def pick(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket that holds ``size``."""
    return next(bucket for bucket in buckets if bucket >= size)


def _growing(first: int, last: int, factor: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)
