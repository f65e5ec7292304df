"""Pages for requests: admission, growth, publication in the prefix cache, release. Owns the only place where pages change hands, between
requests and between the tiers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from pdd.worker.host_tier import Blocks, HostTier, TierCounts
from pdd.worker.pages import PageCounts, PagePool
from pdd.worker.prefix_cache import Lease, PrefixCache
from pdd.worker.radix import PageTokens
from pdd.worker.request import Phase, RequestState
from pddbridge.engine import KVBlock
from pddbridge.kv_spec import KVSpec, TokenRange

logger = logging.getLogger(__name__)


class DevicePages(Protocol):
    """What of an engine moves pages; see :class:`pddbridge.engine.Engine`."""

    @property
    def kv_spec(self) -> KVSpec: ...
    def read_kv(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> tuple[KVBlock, ...]: ...
    def write_kv(self, page_table: np.ndarray, block: KVBlock) -> None: ...
    def copy_page(self, source: int, destination: int) -> None: ...


class KVMemory:
    """``use_cache`` False: no prefix is ever found or kept. ``host_bytes``: of host memory for pages that leave the device; 0 for none.
    ``num_lost``: pages that could not be read when they were to move there.
    """

    def __init__(self, num_pages: int, page_size: int, device: DevicePages, use_cache: bool, host_bytes: int = 0) -> None:
        self.num_lost = 0
        self._pool = PagePool(num_pages)
        self._page_size = page_size
        self._device = device
        self._host = HostTier(host_bytes, page_size, device.kv_spec) if use_cache and host_bytes else None
        on_evict = None if self._host is None else self._move_to_host
        self._cache = PrefixCache(self._pool, page_size, on_evict) if use_cache else None
        self._num_pages = num_pages

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def can_ever_hold(self, num_tokens: int) -> bool:
        return self.pages_for(num_tokens) <= self._num_pages

    def counts(self) -> PageCounts:
        return self._pool.counts()

    def host_counts(self) -> TierCounts:
        """All zero without a second tier."""
        return TierCounts() if self._host is None else self._host.counts()

    def admit(self, request: RequestState, headroom_pages: int, others: Iterable[RequestState] = ()) -> bool:
        """Give ``request`` pages for all its tokens, the longest cached prefix among them: sets ``pages`` and ``kv_len``.

        False, and nothing changed, when even eviction leaves fewer than needed plus ``headroom_pages``. A hit that ends inside a page
        copies the page; where there is no room for copy and source together, the partial page is left out. A page that one of ``others``
        is still filling is found too. What host memory has beyond the pages on the device is written to the new ones.
        """
        tokens = request.tokens.view(0, len(request.tokens)).tolist()
        needed = self.pages_for(len(tokens))
        if self._cache is None or request.prompt_logprobs is not None:  # what is scored must be computed
            if not self._make_room(needed + headroom_pages):
                return False
            request.pages, request.kv_len = self._pool.allocate(needed, request.request_id), 0
            return True
        lease = self._cache.lookup(request.tenant, tokens, request.request_id)
        found = () if self._host is None else self._host.find(request.tenant, tokens, len(lease.pages))
        if found and lease.partial_page is not None:
            if found[-1][0].tokens.stop > lease.num_tokens:
                self._pool.unpin((lease.partial_page,), request.request_id)
                lease = Lease(lease.pages, lease.num_tokens - lease.partial_tokens, None, 0)
            else:
                found = ()
        fresh = needed - len(lease.pages)
        growing = None if found else _growing_page(request, lease, others, self._page_size)
        if growing is not None:
            if not self._make_room(fresh + headroom_pages):
                self._unpin(lease, request)
                return False
            page, num_tokens = growing
            if lease.partial_page is not None:
                self._pool.unpin((lease.partial_page,), request.request_id)
            request.pages = [*lease.pages, *self._pool.allocate(fresh, request.request_id)]
            self._device.copy_page(page, request.pages[len(lease.pages)])
            request.kv_len = len(lease.pages) * self._page_size + num_tokens
            return True
        has_room = self._make_room(fresh + headroom_pages)
        if lease.partial_page is not None and not has_room:
            self._pool.unpin((lease.partial_page,), request.request_id)
            if not self._make_room(fresh + headroom_pages):
                self._pool.unpin(lease.pages, request.request_id)
                return False
            request.pages = [*lease.pages, *self._pool.allocate(fresh, request.request_id)]
            request.kv_len = lease.num_tokens - lease.partial_tokens
            return True
        if not has_room:
            self._pool.unpin(lease.pages, request.request_id)
            return False
        request.pages = [*lease.pages, *self._pool.allocate(fresh, request.request_id)]
        request.kv_len = lease.num_tokens - lease.partial_tokens
        if lease.partial_page is not None:
            try:
                self._device.copy_page(lease.partial_page, request.pages[len(lease.pages)])
            finally:
                self._pool.unpin((lease.partial_page,), request.request_id)
            request.kv_len = lease.num_tokens
        if found:  # looked up again: making room moved pages there, and others out
            assert self._host is not None, "found there"
            self._move_to_device(request, self._host.find(request.tenant, tokens, len(lease.pages)))
        return True

    def grow(self, request: RequestState, num_tokens: int) -> bool:
        """Make ``request``'s pages reach ``num_tokens``, evicting if need be. False, and nothing changed, when there is no room."""
        more = self.pages_for(num_tokens) - len(request.pages)
        if more <= 0:
            return True
        if not self._make_room(more):
            return False
        request.pages += self._pool.allocate(more, request.request_id)
        return True

    def rewind(self, request: RequestState, num_tokens: int) -> None:
        """``request`` computed past ``num_tokens`` what does not count: forget that KV and let its pages go.

        A page that the cache knows (after a preemption) is never written, so one that is kept in part is let go of as a whole and its
        tokens are computed again.
        """
        request.kv_len = min(request.kv_len, num_tokens)
        kept = self.pages_for(request.kv_len)
        if request.kv_len % self._page_size and self._pool.is_cached(request.pages[kept - 1]):
            kept -= 1
            request.kv_len = kept * self._page_size
        self._pool.unpin(request.pages[kept:], request.request_id)
        request.pages = request.pages[:kept]

    def publish(self, request: RequestState) -> None:
        """Make the full pages of ``[0, kv_len)`` findable. Duplicates of what is cached already are given back at once."""
        if self._cache is None:
            return
        num_full = min(request.kv_len // self._page_size, len(request.pages))
        tokens = request.tokens.view(0, num_full * self._page_size).tolist()
        request.pages[:num_full] = self._cache.insert(request.tenant, tokens, request.pages[:num_full], request.request_id)

    def release(self, request: RequestState) -> None:
        """Publish what is worth it and let all pages go. No writer may be left that can reach them."""
        if not request.pages:
            return
        self.publish(request)
        self._pool.unpin(request.pages, request.request_id)
        request.pages = []

    def check(self) -> None:
        """Raises LedgerError when the books do not balance."""
        if self._cache is None:
            self._pool.check([])
        else:
            self._cache.check()
        if self._host is not None:
            self._host.check()

    def _unpin(self, lease: Lease, request: RequestState) -> None:
        partial = () if lease.partial_page is None else (lease.partial_page,)
        self._pool.unpin((*lease.pages, *partial), request.request_id)

    def _make_room(self, num_pages: int) -> bool:
        """Evict until ``num_pages`` are free. Evicts nothing when that cannot be reached: idle pages are all evictable."""
        if self._pool.num_free + self._pool.num_idle < num_pages:
            return False
        if self._cache is not None and num_pages > self._pool.num_free:
            self._cache.evict(num_pages - self._pool.num_free)
        assert self._pool.num_free >= num_pages, "an idle page could not be evicted"
        return True

    def _move_to_host(self, namespace: str, path: list[PageTokens], page: int) -> None:
        """``page``, the end of the prefix ``path``, is about to become free."""
        assert self._host is not None, "only a second tier asks to be told"
        if self._host.touch(namespace, path):
            return  # it has been there before
        table = np.zeros(len(path), np.int32)
        table[-1] = page
        stop = len(path) * self._page_size
        tokens = TokenRange(stop - self._page_size, stop)
        try:
            self._host.put(namespace, path, lambda room: self._device.read_kv(table, tokens, room))
        except Exception:  # the page was of use to nobody but a later hit
            logger.exception("page %d could not be read and is lost to the prefix cache", page)
            self.num_lost += 1

    def _move_to_device(self, request: RequestState, found: tuple[Blocks, ...]) -> None:
        """Write what host memory had into the pages of ``request``; ``kv_len`` covers what was written. Raises what the engine does."""
        table = np.array(request.pages, np.int32)
        for blocks in found:
            assert self._host is not None, "found there"
            for block in blocks:
                self._device.write_kv(table, block)
            self._host.count_hit(blocks[0].tokens.stop - request.kv_len)
            request.kv_len = blocks[0].tokens.stop


def _growing_page(request: RequestState, lease: Lease, others: Iterable[RequestState], page_size: int) -> tuple[int, int] | None:
    """A page that another request holds and the cache does not know, because it is not full: (page, how many of its tokens continue
    ``lease`` for ``request``), if that is more than the lease has. It keeps its page while it is copied: nobody runs in between.

    Who has the very pages of the lease has its tokens: publishing leaves one page for equal tokens.
    """
    start = len(lease.pages) * page_size
    wanted = request.tokens.view(start, min(start + page_size, len(request.tokens) - 1))
    best: tuple[int, int] | None = None
    most = lease.partial_tokens
    for other in others:
        if other is request or other.tenant != request.tenant or other.phase is not Phase.ACTIVE or other.kv_len <= start + most:
            continue
        if tuple(other.pages[: len(lease.pages)]) != lease.pages:
            continue
        theirs = other.tokens.view(start, min(start + page_size, other.kv_len))
        length = min(len(wanted), len(theirs))
        differs = np.flatnonzero(wanted[:length] != theirs[:length])
        common = int(differs[0]) if differs.size else length
        if common > most:
            best, most = (other.pages[len(lease.pages)], common), common
    return best
