"""Decode kernels with fixed arrays in plain PyTorch: what :class:`pddtorch.decode_graphs.DecodeGraphs` needs of a path, on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.torch_ops import FixedDecode, PortableOps, Problem


class FixedOps(PortableOps):
    """As on every device, and all keys that a row could have, masked by what it has."""

    def fixed_decode(self, num_rows: int, max_context_tokens: int) -> FixedDecode | None:
        return _Fixed.of(num_rows, max_context_tokens, self.problem)


@dataclass(frozen=True)
class _Fixed:
    """``tables`` [R, P], ``contexts`` [R], ``count`` [1] i64. Rows from ``count`` on store into the pool's last page, the engine's own."""

    tables: torch.Tensor
    contexts: torch.Tensor
    count: torch.Tensor
    page_size: int

    @staticmethod
    def of(num_rows: int, max_context_tokens: int, problem: Problem) -> _Fixed:
        tables = torch.zeros((num_rows, -(-max_context_tokens // problem.page_size)), dtype=torch.int64)
        return _Fixed(tables, torch.zeros(num_rows, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), problem.page_size)

    @property
    def kernels(self) -> _Fixed:
        return self

    def fill(self, context_lens: np.ndarray, page_tables: np.ndarray) -> None:
        rows, width = len(context_lens), int(context_lens.max()) // self.page_size + 1
        used = np.arange(width) <= (context_lens // self.page_size)[:, None]
        self.tables[:rows, :width] = torch.from_numpy(np.where(used, page_tables[:, :width], 0))
        self.contexts[:rows] = torch.from_numpy(context_lens)
        self.count.fill_(rows)

    def append(self, k_pages: torch.Tensor, v_pages: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        pages = self.tables.gather(1, self.contexts[:, None] // self.page_size)[:, 0]
        pages = torch.where(self._live(), pages, len(k_pages) - 1)
        slots = self.contexts % self.page_size
        k_pages.index_put_((pages[:, None], self._heads(k_pages), slots[:, None]), keys.to(k_pages.dtype))
        v_pages.index_put_((pages[:, None], self._heads(v_pages), slots[:, None]), values.to(v_pages.dtype))

    def attend(
        self,
        queries: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        options: AttentionOptions,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows that are not live get NaN: arbitrary values, at their worst."""
        num_rows, _, dim = queries.shape
        num_kv_heads = k_pages.shape[1]
        k, v = (pages[self.tables].transpose(1, 2).flatten(2, 3).float() for pages in (k_pages, v_pages))
        keys = torch.arange(k.shape[2])
        seen = keys <= self.contexts[:, None]
        if options.window is not None:
            seen &= keys > self.contexts[:, None] - options.window
        seen = seen[:, None, None]
        scores = (queries.float() * options.scale).view(num_rows, num_kv_heads, -1, dim) @ k.transpose(2, 3)
        if options.soft_cap is not None:
            scores = (scores / options.soft_cap).tanh() * options.soft_cap
        weights = torch.where(seen, scores, float("-inf")).softmax(-1)
        out = weights @ torch.where(seen.transpose(2, 3), v, 0.0)
        return torch.where(self._live()[:, None, None], out.view(queries.shape), float("nan")).to(queries.dtype)

    def _live(self) -> torch.Tensor:
        return torch.arange(len(self.contexts)) < self.count

    @staticmethod
    def _heads(pages: torch.Tensor) -> torch.Tensor:
        return torch.arange(pages.shape[1])[None]
