"""The second tier of the prefix cache: what it finds, what it keeps, and requests that live off it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.worker import messages as m
from pdd.worker.executor import ExecutorLimits
from pdd.worker.host_tier import Blocks, HostTier
from pdd.worker.radix import PageTokens
from pddbridge.kv_block import room_for
from pddbridge.kv_spec import TokenRange
from tests.support.executor_driver import ExecutorDriver
from tests.support.fake_engine import KV_SPEC, FakeEngine, blocks_of, expected_log
from tests.support.worker_harness import WorkerHarness

SIZE = 3
PAGE_BYTES = room_for(KV_SPEC, SIZE)


def path_of(tokens: list[int]) -> list[PageTokens]:
    return [tuple(tokens[i : i + SIZE]) for i in range(0, len(tokens) - SIZE + 1, SIZE)]


def page_of(tokens: list[int], index: int) -> Blocks:
    return blocks_of(tokens, TokenRange(index * SIZE, (index + 1) * SIZE))


def stop_of(found: tuple[Blocks, ...]) -> int:
    return found[-1][0].tokens.stop if found else 0


def keep(tier: HostTier, tokens: list[int], index: int, namespace: str = "a") -> None:
    path = path_of(tokens)[: index + 1]
    if not tier.touch(namespace, path):
        tier.put(namespace, path, lambda _: page_of(tokens, index))
    tier.check()


class Oracle:
    """Pages by (namespace, whole prefix) in order of use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.pages: list[tuple[str, tuple[int, ...]]] = []

    def keep(self, namespace: str, tokens: list[int], index: int) -> None:
        page = (namespace, tuple(tokens[: (index + 1) * SIZE]))
        if page in self.pages:
            self.pages.remove(page)
        self.pages.append(page)
        self.pages = self.pages[-self.capacity :]

    def covered(self, namespace: str, tokens: list[int], num_pages: int) -> int:
        """The longest prefix in tokens, by comparing with every page."""
        best, limit = num_pages * SIZE, len(tokens) - 1
        while best + SIZE <= limit and (namespace, tuple(tokens[: best + SIZE])) in self.pages:
            best += SIZE
        longest = 0
        for name, page in self.pages:
            if name == namespace and len(page) == best + SIZE and list(page[:best]) == tokens[:best]:
                tail, wanted = page[best:], tokens[best : min(best + SIZE, limit)]
                common = next((i for i, (x, y) in enumerate(zip(tail, wanted, strict=False)) if x != y), min(len(tail), len(wanted)))
                longest = max(longest, common)
        return best + longest


tokens_lists = st.lists(st.integers(0, 1), min_size=SIZE, max_size=5 * SIZE + 2)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), tokens_lists, st.integers(0, 4), st.booleans()), max_size=30))
def test_finds_what_a_linear_search_finds(steps: list[tuple[str, list[int], int, bool]]) -> None:
    tier, oracle = HostTier(4 * PAGE_BYTES + 1, SIZE, KV_SPEC), Oracle(4)
    for namespace, tokens, number, puts in steps:
        index = min(number, len(tokens) // SIZE - 1)
        if puts:
            keep(tier, tokens, index, namespace)
            oracle.keep(namespace, tokens, index)
        assert tier.counts().pages == len(oracle.pages)
        for num_pages in range(len(tokens) // SIZE):
            found = tier.find(namespace, tokens, num_pages)
            assert max(num_pages * SIZE, stop_of(found)) == oracle.covered(namespace, tokens, num_pages)
            for blocks in found:
                for block, want in zip(blocks, blocks_of(tokens, blocks[0].tokens), strict=True):
                    assert np.array_equal(block.values, want.values)
            # Looking was using: from the end of the prefix to its beginning, so the beginning is youngest.
            for blocks in reversed(found):
                fitting = [
                    p
                    for p in oracle.pages
                    if p[0] == namespace and blocks[0].tokens.start == len(p[1]) - SIZE and _starts(p[1], tokens, blocks)
                ]
                # Several pages may begin alike: the one just before where the prefix would stand is used, else the one just after.
                limited = tuple(tokens[: min(blocks[0].tokens.start + SIZE, len(tokens) - 1)])
                before = [p for p in fitting if p[1] < limited]
                page = max(before) if before else min(fitting)
                oracle.pages.remove(page)
                oracle.pages.append(page)


def _starts(page: tuple[int, ...], tokens: list[int], blocks: Blocks) -> bool:
    return list(page[: blocks[0].tokens.stop]) == tokens[: blocks[0].tokens.stop]


def test_a_page_larger_than_the_tier_is_not_kept() -> None:
    tier = HostTier(PAGE_BYTES - 1, SIZE, KV_SPEC)
    tier.put("a", [(1, 2, 3)], lambda _: page_of([1, 2, 3], 0))
    tier.check()
    assert tier.counts().pages == 0


def test_what_a_device_reads_elsewhere_is_copied_and_what_it_reads_there_is_not() -> None:
    tier, tokens = HostTier(2 * PAGE_BYTES, SIZE, KV_SPEC), [1, 2, 3, 4]
    given = page_of(tokens, 0)
    tier.put("elsewhere", [(1, 2, 3)], lambda _: given)
    for block in given:
        block.values[...] = 0

    def there(room: tuple[np.ndarray, ...]) -> Blocks:
        blocks = page_of(tokens, 0)
        for block, array in zip(blocks, room, strict=True):
            array[...] = block.values
        return tuple(replace(block, values=array) for block, array in zip(blocks, room, strict=True))

    tier.put("there", [(1, 2, 3)], there)
    for namespace in ("elsewhere", "there"):
        (blocks,) = tier.find(namespace, tokens, 0)
        assert all(np.array_equal(block.values, want.values) for block, want in zip(blocks, page_of(tokens, 0), strict=True))


def test_all_its_memory_is_resident_from_the_start() -> None:
    process, capacity = psutil.Process(), 64 * 2**20
    before = process.memory_info().rss
    tier = HostTier(capacity, SIZE, KV_SPEC)
    assert process.memory_info().rss - before > 0.9 * capacity
    assert tier.counts().num_bytes == 0


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_bytes"):
        HostTier(0, SIZE, KV_SPEC)


def two_tiers(host_pages: int, num_pages: int = 6) -> tuple[ExecutorDriver, FakeEngine]:
    engine = FakeEngine(page_size=SIZE, num_pages=num_pages, max_context=SIZE * num_pages, max_rows=3)
    return ExecutorDriver(engine, limits=ExecutorLimits(host_cache_bytes=host_pages * PAGE_BYTES)), engine


def serve(driver: ExecutorDriver, request_id: str, prompt: list[int], tenant: str = "t") -> int:
    """Run a request to its end; its tokens must be right. Hit tokens."""
    driver.open(request_id, prompt, max_tokens=2, tenant=tenant)
    driver.run()
    assert driver.log(request_id) == expected_log(prompt, 2)
    driver.close(request_id)
    return driver.of(request_id, m.Reserved)[0].hit_tokens


FIRST, SECOND = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [105, 106, 107, 108, 109, 110, 111, 112, 113, 114, 115, 116]


def test_evicted_pages_come_back_from_host_memory() -> None:
    driver, engine = two_tiers(host_pages=20)
    assert serve(driver, "r1", FIRST) == 0
    assert serve(driver, "r2", SECOND) == 0  # takes all pages but one
    assert driver.snapshot().host.stored > 0
    engine.calls.clear()
    hit = serve(driver, "r3", FIRST)
    assert hit == len(FIRST) - 1
    snapshot = driver.snapshot()
    assert snapshot.host.hit_tokens > 0
    assert engine.calls.count("write_kv") > 0
    driver.assert_idle()


@pytest.mark.parametrize("host_pages", range(1, 6))
def test_what_making_room_drives_out_is_computed_again(host_pages: int) -> None:
    """The pages found for a request are the oldest but for those, and are in the way of the device's own that leave for it."""
    driver, _ = two_tiers(host_pages)
    for number in range(6):
        prompt = [(7 * number + i) % 200 for i in range(14)] if number % 2 else FIRST
        serve(driver, f"r{number}", prompt)
        snapshot = driver.snapshot()
        assert snapshot.host.num_bytes == snapshot.host.pages * PAGE_BYTES <= host_pages * PAGE_BYTES
    driver.assert_idle()


def test_without_a_second_tier_they_are_gone() -> None:
    """What the test above would see if the second tier did nothing."""
    driver, _ = two_tiers(host_pages=0)
    serve(driver, "r1", FIRST)
    serve(driver, "r2", SECOND)
    assert serve(driver, "r3", FIRST) < len(FIRST) - 1
    assert driver.snapshot().host.hit_tokens == 0


@pytest.mark.parametrize("common", range(10))
def test_hits_are_exact_by_token(common: int) -> None:
    driver, _ = two_tiers(host_pages=20)
    serve(driver, "r1", FIRST)
    serve(driver, "r2", SECOND)
    assert serve(driver, "r3", [*FIRST[:common], 200, 201, 202]) == common


def test_tenants_do_not_share_it() -> None:
    driver, _ = two_tiers(host_pages=20)
    serve(driver, "r1", FIRST, tenant="x")
    serve(driver, "r2", SECOND, tenant="x")
    assert serve(driver, "r3", FIRST, tenant="y") == 0
    assert serve(driver, "r4", FIRST, tenant="x") == len(FIRST) - 1


def test_a_page_that_cannot_be_read_is_lost_and_counted() -> None:
    driver, engine = two_tiers(host_pages=20)
    serve(driver, "r1", FIRST)

    def broken(page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> tuple[()]:
        raise RuntimeError("no")

    engine.read_kv = broken  # type: ignore[method-assign]
    assert serve(driver, "r2", SECOND) == 0
    snapshot = driver.snapshot()
    assert snapshot.host_pages_lost > 0
    assert snapshot.host.stored == 0
    driver.assert_idle()


def test_a_failing_write_fails_the_request_alone() -> None:
    driver, engine = two_tiers(host_pages=20)
    serve(driver, "r1", FIRST)
    serve(driver, "r2", SECOND)
    write = engine.write_kv

    def broken(page_table: np.ndarray, block: object) -> None:
        raise RuntimeError("no")

    engine.write_kv = broken  # type: ignore[method-assign, assignment]
    driver.open("r3", FIRST, max_tokens=2)
    assert driver.of("r3", m.Failed)
    driver.close("r3")
    engine.write_kv = write  # type: ignore[method-assign]
    driver.assert_idle()
    assert serve(driver, "r4", SECOND) > 0


async def test_the_ledger_shows_the_second_tier() -> None:
    limits = ExecutorLimits(host_cache_bytes=20 * PAGE_BYTES)
    async with WorkerHarness("w", lambda: FakeEngine(page_size=SIZE, num_pages=6, max_context=18), limits=limits) as worker:
        for request_id, prompt in (("r1", FIRST), ("r2", SECOND), ("r3", FIRST)):
            stream = worker.attach().open(request_id, prompt)
            assert await stream.tokens(2) == expected_log(prompt, 2)
            await stream.half_close()
            ledger = await worker.assert_idle()
        assert ledger.host_pages * PAGE_BYTES == ledger.host_bytes > 0
        assert ledger.host_capacity_bytes == 20 * PAGE_BYTES
        assert ledger.host_hit_tokens > 0
        assert ledger.host_pages_lost == 0
