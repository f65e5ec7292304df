"""The page pool: the ledger holds through every sequence of calls, and a broken one is told with details."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdd.worker.pages import LedgerError, OutOfPagesError, PagePool


def test_a_page_goes_from_free_to_pinned_to_cached_and_back() -> None:
    pool = PagePool(5)
    (page, other) = pool.allocate(2, "r1")
    pool.adopt(page)
    assert (pool.counts().free, pool.counts().cached, pool.counts().pinned) == (3, 0, 2)
    pool.unpin([page, other], "r1")
    assert (pool.counts().free, pool.counts().cached, pool.counts().pinned) == (4, 1, 0)
    pool.evict(page)
    assert pool.counts().free == 5


def test_too_many_pages_are_refused_and_none_is_taken() -> None:
    pool = PagePool(3)
    pool.allocate(2, "r1")
    with pytest.raises(OutOfPagesError, match="2 pages asked for, 1 free of 3"):
        pool.allocate(2, "r2")
    assert pool.num_free == 1


def test_ownership_mistakes_raise() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1, "r1")
    with pytest.raises(LedgerError, match="not in the cache"):
        pool.pin([page], "r2")  # what one request writes is never shared
    with pytest.raises(LedgerError, match="does not hold page"):
        pool.unpin([page], "r2")
    with pytest.raises(LedgerError, match="evict"):
        pool.evict(page)
    pool.adopt(page)
    with pytest.raises(LedgerError, match="adopt"):
        pool.adopt(page)
    with pytest.raises(LedgerError, match="holds page 0 already"):
        pool.pin([page], "r1")
    pool.unpin([page], "r1")
    with pytest.raises(LedgerError, match="does not hold"):
        pool.unpin([page], "r1")


def test_check_tells_a_page_that_the_cache_lost() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1, "r1")
    pool.adopt(page)
    pool.check([page])
    with pytest.raises(LedgerError, match=r"cache holds \[\], pool believes \[0\]"):
        pool.check([])


def test_check_tells_a_lost_page_and_a_double_one() -> None:
    pool = PagePool(3)
    pool._free.remove(2)
    with pytest.raises(LedgerError, match=r"lost: \[2\]"):
        pool.check([])
    pool._free += [1, 2]
    with pytest.raises(LedgerError, match=r"free twice: \[1\]"):
        pool.check([])


class PoolMachine(RuleBasedStateMachine):
    """The pool against three plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.idle: list[int] = []
        self.pool.on_idle(self.idle.append)
        self.held: dict[str, set[int]] = {name: set() for name in "abc"}
        self.cached: set[int] = set()

    @rule(name=st.sampled_from("abc"), count=st.integers(0, 5))
    def allocate(self, name: str, count: int) -> None:
        free = 12 - len(set().union(*self.held.values()) | self.cached)
        if count > free:
            with pytest.raises(OutOfPagesError):
                self.pool.allocate(count, name)
            return
        pages = set(self.pool.allocate(count, name))
        assert len(pages) == count
        assert not pages & (set().union(*self.held.values()) | self.cached)
        self.held[name] |= pages

    @rule(name=st.sampled_from("abc"), data=st.data())
    def adopt(self, name: str, data: st.DataObject) -> None:
        if own := sorted(self.held[name] - self.cached):
            page = data.draw(st.sampled_from(own))
            self.pool.adopt(page)
            self.cached.add(page)

    @rule(name=st.sampled_from("abc"), data=st.data())
    def pin(self, name: str, data: st.DataObject) -> None:
        if others := sorted(self.cached - self.held[name]):
            page = data.draw(st.sampled_from(others))
            self.pool.pin([page], name)
            self.held[name].add(page)

    @rule(name=st.sampled_from("abc"))
    def release(self, name: str) -> None:
        pages, self.held[name] = self.held[name], set()
        self.idle.clear()
        self.pool.unpin(sorted(pages), name)
        assert set(self.idle) == {p for p in pages if p in self.cached and not any(p in held for held in self.held.values())}

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        if idle := sorted(self.cached - set().union(*self.held.values())):
            page = data.draw(st.sampled_from(idle))
            self.pool.evict(page)
            self.cached.remove(page)

    @invariant()
    def books_balance(self) -> None:
        held = set().union(*self.held.values())
        counts = self.pool.counts()
        assert (counts.pinned, counts.cached, counts.free) == (len(held), len(self.cached - held), 12 - len(held | self.cached))
        self.pool.check(sorted(self.cached))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
