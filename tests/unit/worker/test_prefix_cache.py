"""The radix cache against a brute-force model, and the reported faults about hits: cases 7, 8 and 20."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdd.worker.pages import PagePool
from pdd.worker.prefix_cache import PrefixCache

PAGE = 4


def fill(pool: PagePool, cache: PrefixCache, tokens: list[int], namespace: str = "t", page_size: int = PAGE) -> list[int]:
    """A request computed ``tokens`` and ended."""
    full = len(tokens) // page_size
    pages = pool.allocate(full, "filler")
    pages = cache.insert(namespace, tokens[: full * page_size], pages, "filler")
    pool.unpin(pages, "filler")
    return pages


def hit(cache: PrefixCache, pool: PagePool, tokens: list[int], namespace: str = "t") -> int:
    """Length of the hit; the lease is given back at once."""
    lease = cache.lookup(namespace, tokens, "looker")
    partial = [] if lease.partial_page is None else [lease.partial_page]
    pool.unpin([*lease.pages, *partial], "looker")
    return lease.num_tokens


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12])
def test_the_whole_prompt_again_leaves_one_token_to_compute(length: int) -> None:
    pool = PagePool(16)
    cache = PrefixCache(pool, PAGE)
    tokens = list(range(100, 100 + length))
    fill(pool, cache, [*tokens, *range(50, 58)])  # prompt and some output
    for _ in range(3):
        assert hit(cache, pool, tokens) == length - 1
        cache.check()


def test_a_hit_stops_at_the_differing_token_inside_a_page() -> None:
    pool = PagePool(16)
    cache = PrefixCache(pool, 8)
    first = fill(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], page_size=8)
    lease = cache.lookup("t", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 99, 13, 14, 15, 16, 17], "looker")
    assert lease.pages == (first[0],)
    assert (lease.num_tokens, lease.partial_page, lease.partial_tokens) == (11, first[1], 3)
    pool.unpin([*lease.pages, first[1]], "looker")
    assert hit(cache, pool, [1, 2, 3, 99, 5, 6, 7, 8, 9]) == 3


def test_the_longest_of_several_continuations_is_found() -> None:
    pool = PagePool(16)
    cache = PrefixCache(pool, PAGE)
    for tail in ([5, 6, 7, 8], [5, 6, 9, 9], [5, 1, 1, 1], [4, 9, 9, 9]):
        fill(pool, cache, [1, 2, 3, 4, *tail])
    assert hit(cache, pool, [1, 2, 3, 4, 5, 6, 9, 1, 1]) == 7
    assert hit(cache, pool, [1, 2, 3, 4, 5, 2, 0, 0]) == 5
    assert hit(cache, pool, [1, 2, 3, 4, 6, 6, 6, 6]) == 4


def test_tenants_share_nothing() -> None:
    pool = PagePool(16)
    cache = PrefixCache(pool, PAGE)
    fill(pool, cache, [1, 2, 3, 4], "alice")
    assert hit(cache, pool, [1, 2, 3, 4, 5], "bob") == 0
    assert hit(cache, pool, [1, 2, 3, 4, 5], "alice") == 4


def test_duplicates_are_released_and_the_holder_gets_the_cached_pages() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool, PAGE)
    kept = fill(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8])
    own = pool.allocate(3, "r")
    now = cache.insert("t", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], own, "r")
    assert now == [*kept, own[2]]
    assert pool.num_free == 8 - 3
    pool.unpin(now, "r")
    assert pool.counts().cached == 3
    cache.check()


def test_eviction_takes_the_longest_idle_leaf_first_and_never_a_leased_page() -> None:
    pool = PagePool(6)
    cache = PrefixCache(pool, PAGE)
    old = fill(pool, cache, [1, 1, 1, 1, 2, 2, 2, 2])
    new = fill(pool, cache, [3, 3, 3, 3])
    lease = cache.lookup("t", [1, 1, 1, 1, 9, 9], "r")
    assert lease.pages == (old[0],)
    assert cache.evict(1) == 1  # the leaf below the leased page
    assert hit(cache, pool, [1, 1, 1, 1, 2, 2, 2, 2, 2]) == 4
    assert cache.evict(5) == 1  # the newer one; the leased page stays
    assert cache.pages() == [old[0]]
    assert new[0] not in cache.pages()
    pool.unpin(lease.pages, "r")
    assert cache.evict(1) == 1
    assert pool.num_free == 6
    cache.check()


def test_a_looked_up_prefix_outlives_an_older_one() -> None:
    pool = PagePool(6)
    cache = PrefixCache(pool, PAGE)
    fill(pool, cache, [1, 1, 1, 1])
    fill(pool, cache, [2, 2, 2, 2])
    assert hit(cache, pool, [1, 1, 1, 1, 1]) == 4
    cache.evict(1)
    assert hit(cache, pool, [1, 1, 1, 1, 1]) == 4
    assert hit(cache, pool, [2, 2, 2, 2, 2]) == 0


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)


class CacheMachine(RuleBasedStateMachine):
    """The tree against a dict from every cached (namespace, prefix) to its page, with requests that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(10)
        self.cache = PrefixCache(self.pool, 3)
        self.model: dict[tuple[str, tuple[int, ...]], int] = {}
        self.requests: dict[str, tuple[str, list[int], list[int]]] = {}
        self.num_requests = 0

    @rule(namespace=st.sampled_from("xy"), tokens=TOKENS)
    def open(self, namespace: str, tokens: list[int]) -> None:
        name = f"r{self.num_requests}"
        self.num_requests += 1
        lease = self.cache.lookup(namespace, tokens, name)
        self.check_lease(namespace, tokens, lease.num_tokens, lease.pages, lease.partial_page, lease.partial_tokens)
        if lease.partial_page is not None:
            self.pool.unpin([lease.partial_page], name)
        fresh = -(-len(tokens) // 3) - len(lease.pages)
        counts = self.pool.counts()
        if counts.free + counts.cached < fresh:
            self.pool.unpin(lease.pages, name)
            return
        missing = fresh - counts.free
        before = set(self.cache.pages())
        if missing > 0:
            assert self.cache.evict(missing) == missing
        gone = before - set(self.cache.pages())
        self.model = {key: page for key, page in self.model.items() if page not in gone}
        assert not gone & {page for _, _, pages in self.requests.values() for page in pages}
        self.requests[name] = (namespace, tokens, [*lease.pages, *self.pool.allocate(fresh, name)])

    @rule(data=st.data(), end=st.booleans())
    def publish(self, data: st.DataObject, end: bool) -> None:
        if not self.requests:
            return
        name = data.draw(st.sampled_from(sorted(self.requests)))
        namespace, tokens, pages = self.requests[name]
        full = len(tokens) // 3
        now = self.cache.insert(namespace, tokens[: full * 3], pages[:full], name)
        for i in range(full):
            kept = self.model.setdefault((namespace, tuple(tokens[: 3 * i + 3])), pages[i])
            assert now[i] == kept
        self.requests[name] = (namespace, tokens, [*now, *pages[full:]])
        if end:
            self.pool.unpin(self.requests.pop(name)[2], name)

    def check_lease(
        self, namespace: str, tokens: list[int], num_tokens: int, pages: tuple[int, ...], partial: int | None, partial_tokens: int
    ) -> None:
        def common(prefix: tuple[int, ...]) -> int:
            n = next((i for i, (a, b) in enumerate(zip(prefix, tokens, strict=False)) if a != b), min(len(prefix), len(tokens)))
            return min(n, len(tokens) - 1)

        best = max((common(prefix) for (space, prefix) in self.model if space == namespace), default=0)
        assert num_tokens == best
        assert list(pages) == [self.model[(namespace, tuple(tokens[: 3 * i + 3]))] for i in range(best // 3)]
        assert partial_tokens == best % 3
        if partial_tokens:
            holders = [prefix for (space, prefix), page in self.model.items() if page == partial and space == namespace]
            assert len(holders) == 1
            assert list(holders[0][:best]) == tokens[:best]

    @invariant()
    def consistent(self) -> None:
        self.cache.check()
        assert sorted(self.cache.pages()) == sorted(self.model.values())


CacheMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=25, deadline=None)
TestCache = CacheMachine.TestCase
