"""The few static shapes that steps are padded to. Fewer buckets compile faster, more waste less; the numbers here are that balance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KV_TOKENS: Final = 128  # of one read_kv or write_kv piece; longer ranges are cut
_FEW_ROWS: Final = 4
_SMALLEST_RAGGED: Final = 16
_FINEST_TOKENS: Final = 64
_EVEN_BUCKETS: Final = 8


@dataclass(frozen=True)
class Buckets:
    """``rows``: R of a decode-only step, and of sampling rows · ``tokens``: T of any other step. Ascending, the last is the limit."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    @staticmethod
    def up_to(max_rows: int, max_step_tokens: int) -> Buckets:
        """Rows grow twice from bucket to bucket from 4 on: a CPU's products with 16 columns take half as long again as with 8. Tokens grow
        evenly, by 64 or an eighth of the limit, and four times below that: what is left of some prompts after full steps is computed with
        its padding, which shows as dips in throughput. Each bucket of a 30-layer model costs 3 to 6 CPU-seconds of compiling.
        """
        rows = (1, *_growing(_FEW_ROWS, max_rows, 2)) if max_rows > 1 else (1,)
        even = max(_FINEST_TOKENS, -(-max_step_tokens // _EVEN_BUCKETS))
        small = (size for size in _growing(_SMALLEST_RAGGED, max_step_tokens, 4) if size < min(even, max_step_tokens))
        return Buckets(rows, (*small, *range(even, max_step_tokens, even), max_step_tokens))


def pick(buckets: tuple[int, ...], size: int) -> int:
    """The smallest bucket that holds ``size``."""
    return next(bucket for bucket in buckets if bucket >= size)


def _growing(first: int, last: int, factor: int) -> tuple[int, ...]:
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)
