"""Which steps are run before a worker reports ready."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pddbridge.engine import EngineConfig, SampleRow, Step
from pddbridge.sampling_params import SamplingParams

_CONTEXT_TOKENS = 64


@dataclass(frozen=True)
class WarmUpShape:
    """``news``: new tokens per row; every row has ``context_len`` tokens before them and samples."""

    label: str
    news: tuple[int, ...]
    context_len: int
    page_size: int

    def step(self, page: int) -> Step:
        """A step all of whose tokens live in ``page``, over and over: its values mean nothing, its work is that of a real step."""
        num_pages = -(-(self.context_len + max(self.news)) // self.page_size)
        params = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
        nothing = np.zeros(0, np.int32)
        return Step(
            token_ids=np.zeros(sum(self.news), np.int32),
            row_starts=np.cumsum([0, *self.news], dtype=np.int32),
            context_lens=np.full(len(self.news), self.context_len, np.int32),
            page_tables=np.full((len(self.news), num_pages), page, np.int32),
            samples=tuple(SampleRow(row, 0, params, nothing, nothing) for row in range(len(self.news))),
        )


def warm_up_shapes(config: EngineConfig) -> list[WarmUpShape]:
    """Decode with 1, 2, 4 ... rows, the largest chunk, and a chunk that shares its step with decode rows."""
    max_rows = min(config.max_rows, config.max_step_tokens)
    rows = sorted({*(1 << bit for bit in range(max_rows.bit_length())), max_rows})
    context_len = min(_CONTEXT_TOKENS, config.max_context_tokens - 1)
    shapes = [WarmUpShape(f"decode, {n} rows", (1,) * n, context_len, config.page_size) for n in rows]
    chunk = min(config.max_step_tokens, config.max_context_tokens)
    shapes.append(WarmUpShape(f"chunk of {chunk} tokens", (chunk,), 0, config.page_size))
    mixed = (min(chunk, config.max_context_tokens - context_len) - (max_rows - 1),) + (1,) * (max_rows - 1)
    if mixed[0] > 1 and max_rows > 1:
        shapes.append(WarmUpShape(f"chunk of {mixed[0]} tokens beside {max_rows - 1} decode rows", mixed, context_len, config.page_size))
    return shapes
