"""What is compiled for every target: operations at the shapes of real models, in the phases of serving. Imports no framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pddkernels.targets.work import Row

PAGE_SIZE: Final = 16
NUM_PAGES: Final = 4096


@dataclass(frozen=True)
class Phase:
    """Rows of a step. Compiled code depends on their number and on that of their new tokens; contexts are what the roofline counts."""

    name: str
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.rows)

    @property
    def max_context_tokens(self) -> int:
        return max(context_len + new for context_len, new in self.rows)


PREFILL: Final = Phase("prefill 2048", (Row(0, 2048),))
DECODE: Final = Phase("decode 64 x 4096", tuple(Row(4096, 1) for _ in range(64)))
# A prefill chunk behind its prompt's first half, extends as main's ingest has them, and decode rows.
MIXED: Final = Phase("mixed 512+4x16+28", (Row(512, 512), *(Row(2048, 16) for _ in range(4)), *(Row(4096, 1) for _ in range(28))))
PHASES: Final = (PREFILL, DECODE, MIXED)
