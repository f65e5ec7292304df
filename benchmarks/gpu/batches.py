"""Ragged batches over paged KV, drawn on the device itself: NaN in every slot that no row may read, scattered pages, new tokens apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from benchmarks.gpu.sizes import Rows

PAGE_SIZE: Final = 16
_SPARE_PAGES: Final = 4


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Batch:
    """``row_starts`` [R+1], ``context_lens`` [R], ``page_tables`` [R, P] i32, entries past a row's need naming a page of NaN · ``queries``
    [T, heads, dim] · ``k_pages``, ``v_pages`` [N, kv_heads, PAGE_SIZE, dim] without the new tokens, whose ``keys`` (float32) and ``values``
    [T, kv_heads, dim] are parts of wider rows, as an engine has them · ``pages``, ``slots`` [T]: where they belong.
    """

    row_starts: np.ndarray
    context_lens: np.ndarray
    page_tables: np.ndarray
    queries: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pages: torch.Tensor
    slots: torch.Tensor

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the pages as they must be once the new tokens are in."""
        k_pages, v_pages = self.k_pages.clone(), self.v_pages.clone()
        k_pages[self.pages, :, self.slots] = self.keys.to(k_pages.dtype)
        v_pages[self.pages, :, self.slots] = self.values.to(v_pages.dtype)
        return k_pages, v_pages


def draw(rows: Rows, heads: Heads, dtype: torch.dtype, window: int | None, device: torch.device, seed: int) -> Batch:
    """Unit normal values. ``window``: what lies before the first new token's window is NaN, too."""
    generator = torch.Generator(device).manual_seed(seed)
    context_lens, news = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    page_tables, num_pages = tables(context_lens + news, seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    shape = (num_pages, heads.num_kv_heads, PAGE_SIZE, heads.head_dim)
    k_pages, v_pages = (torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
    for context_len, new, table in zip(context_lens.tolist(), news.tolist(), page_tables, strict=True):
        lowest = 0 if window is None else max(0, context_len - window + 1)
        if new and context_len > lowest:
            pages, slots = places(table, np.arange(lowest, context_len), device)
            for pool in (k_pages, v_pages):
                pool[pages, :, slots] = randn(context_len - lowest, heads.num_kv_heads, heads.head_dim).to(dtype)
    row_starts = np.concatenate(([0], np.cumsum(news))).astype(np.int32)
    num_tokens = int(row_starts[-1])
    row = np.repeat(np.arange(len(news)), news)
    positions = np.arange(num_tokens) + (context_lens - row_starts[:-1])[row]
    new_pages, new_slots = page_tables[row, positions // PAGE_SIZE], positions % PAGE_SIZE
    rotated = randn(num_tokens, heads.num_heads + heads.num_kv_heads, heads.head_dim)
    qkv = randn(num_tokens, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim).to(dtype)
    return Batch(
        row_starts,
        context_lens,
        page_tables,
        rotated[:, : heads.num_heads].to(dtype),
        k_pages,
        v_pages,
        rotated[:, heads.num_heads :],
        qkv[:, heads.num_heads + heads.num_kv_heads :],
        torch.from_numpy(new_pages.astype(np.int64)).to(device),
        torch.from_numpy(new_slots.astype(np.int64)).to(device),
    )


def tables(lengths: np.ndarray, seed: int) -> tuple[np.ndarray, int]:
    """Page tables [R, P] i32 of rows of ``lengths`` tokens, in random order, and the number of pages; some belong to nobody."""
    used = -(-lengths // PAGE_SIZE)
    num_pages = int(used.sum()) + _SPARE_PAGES
    ids = np.random.default_rng(seed).permutation(num_pages).astype(np.int32)
    page_tables = np.full((len(lengths), int(used.max()) + 1), ids[-1], np.int32)
    starts = np.cumsum(used) - used
    for table, start, count in zip(page_tables, starts, used, strict=True):
        table[:count] = ids[start : start + count]
    return page_tables, num_pages


def places(table: np.ndarray, positions: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and slots [n] i64 of ``positions`` [n]."""
    pages, slots = table[positions // PAGE_SIZE].astype(np.int64), (positions % PAGE_SIZE).astype(np.int64)
    return torch.from_numpy(pages).to(device), torch.from_numpy(slots).to(device)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that is taken inside is full of NaN (integers: their largest), so an output that nobody writes shows.

    That is what torch does for what it calls deterministic algorithms; none are asked for, it only warns of them.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN equals itself here."""
    kind = {2: torch.int16, 4: torch.int32}[a.itemsize]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
