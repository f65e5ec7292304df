"""Pages for requests: admission, growth, publication in the prefix cache, release. Owns the only place where pages change hands."""

from __future__ import annotations

from collections.abc import Callable

from pdd.worker.pages import PageCounts, PagePool
from pdd.worker.prefix_cache import PrefixCache
from pdd.worker.request import RequestState


class KVMemory:
    """``copy_page(source, destination)`` is the engine's. ``use_cache`` False: no prefix is ever found or kept."""

    def __init__(self, num_pages: int, page_size: int, copy_page: Callable[[int, int], None], use_cache: bool) -> None:
        self._pool = PagePool(num_pages)
        self._page_size = page_size
        self._copy_page = copy_page
        self._cache = PrefixCache(self._pool, page_size) if use_cache else None
        self._num_pages = num_pages

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def can_ever_hold(self, num_tokens: int) -> bool:
        return self.pages_for(num_tokens) <= self._num_pages

    def counts(self) -> PageCounts:
        return self._pool.counts()

    def admit(self, request: RequestState, headroom_pages: int) -> bool:
        """Give ``request`` pages for all its tokens, the longest cached prefix among them: sets ``pages`` and ``kv_len``.

        False, and nothing changed, when even eviction leaves fewer than needed plus ``headroom_pages``. A hit that ends inside a page
        copies the page; where there is no room for copy and source together, the partial page is left out.
        """
        tokens = request.tokens.view(0, len(request.tokens)).tolist()
        needed = self.pages_for(len(tokens))
        if self._cache is None:
            if not self._make_room(needed + headroom_pages):
                return False
            request.pages, request.kv_len = self._pool.allocate(needed, request.request_id), 0
            return True
        lease = self._cache.lookup(request.tenant, tokens, request.request_id)
        fresh = needed - len(lease.pages)
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
                self._copy_page(lease.partial_page, request.pages[len(lease.pages)])
            finally:
                self._pool.unpin((lease.partial_page,), request.request_id)
            request.kv_len = lease.num_tokens
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

    def _make_room(self, num_pages: int) -> bool:
        """Evict until ``num_pages`` are free. Evicts nothing when that cannot be reached: idle pages are all evictable."""
        if self._pool.num_free + self._pool.num_idle < num_pages:
            return False
        if self._cache is not None and num_pages > self._pool.num_free:
            self._cache.evict(num_pages - self._pool.num_free)
        assert self._pool.num_free >= num_pages, "an idle page could not be evicted"
        return True
