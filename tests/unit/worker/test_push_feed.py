"""Push cursors: every receiver gets every position it lacks exactly once, in order, within its window."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdd.worker.push_feed import PushFeed

NAMES = ("relay", "main", "spare")


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=3),
    st.integers(1, 30),
    st.integers(1, 60),
    st.integers(1, 40),
    st.data(),
)
def test_every_position_is_read_once_per_target(firsts: list[int], stop: int, window: int, piece: int, data: st.DataObject) -> None:
    targets = dict(zip(NAMES, firsts, strict=False))
    feed = PushFeed(list(targets.items()), stop, bytes_per_token=4, window_bytes=window, piece_bytes=piece)
    got: dict[str, list[int]] = {name: [] for name in targets}
    owed = dict.fromkeys(targets, 0)
    kv_len = 0
    for _ in range(400):
        if feed.finished:
            break
        kv_len = min(stop + 3, kv_len + data.draw(st.integers(0, 7)))
        while (read := feed.next_read(kv_len)) is not None:
            assert len(read.tokens) <= max(1, piece // 4)
            assert read.tokens.stop <= min(kv_len, stop)
            for name in read.targets:
                assert owed[name] < window
                got[name] += range(read.tokens.start, read.tokens.stop)
                owed[name] += 4 * len(read.tokens)
        for name in data.draw(st.sets(st.sampled_from(sorted(targets)))):
            feed.acknowledge(name, owed[name])
            owed[name] = 0
    else:
        for name in targets:
            feed.acknowledge(name, owed[name])
        kv_len = stop
        while (read := feed.next_read(kv_len)) is not None:
            for name in read.targets:
                got[name] += range(read.tokens.start, read.tokens.stop)
                feed.acknowledge(name, 4 * len(read.tokens))
    assert feed.finished
    assert got == {name: list(range(first, stop)) for name, first in targets.items()}


def test_an_ended_target_is_read_for_no_more() -> None:
    feed = PushFeed([("relay", 0), ("main", 0)], 10, 4, 1000, 1000)
    feed.end("main")
    read = feed.next_read(10)
    assert read is not None
    assert read.targets == ("relay",)
    assert feed.finished
