"""Who takes a new request: the least loaded, or who knows the prompt's beginning while its load allows it."""

from __future__ import annotations

import hashlib
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from pdd.policy.prefixes import MAX_CHUNKS, PrefixMemory, fingerprints
from pdd.policy.routing import RoutingLimits, WorkerLoad, choose_worker

ROLES = st.sampled_from(["prefill", "relay", "main"])
LOADS = st.builds(
    WorkerLoad,
    name=st.sampled_from([f"w{i}" for i in range(6)]),
    role=ROLES,
    ready=st.booleans(),
    num_held=st.integers(0, 12),
    max_rows=st.integers(1, 8),
    prefix_tokens=st.sampled_from([0, 32, 64, 96, 4096]),
)
FLEETS = st.lists(LOADS, max_size=6, unique_by=lambda w: w.name)
LIMITS = st.builds(RoutingLimits, affinity_slack=st.sampled_from([0.0, 0.125, 0.25, 1.0]), min_prefix_tokens=st.sampled_from([1, 64, 200]))


def main(name: str, num_held: int, max_rows: int = 8, prefix_tokens: int = 0, ready: bool = True) -> WorkerLoad:
    return WorkerLoad(name, "main", ready, num_held, max_rows, prefix_tokens)


def chosen(workers: list[WorkerLoad], **wish: object) -> tuple[str, str]:
    route = choose_worker(workers, "main", **wish)  # type: ignore[arg-type]
    assert route is not None
    return route.name, route.reason


def test_least_loaded_counts_shares_of_rows_and_skips_what_is_not_ready() -> None:
    workers = [main("m0", 4, 16), main("m1", 3), main("m2", 0, ready=False), WorkerLoad("r0", "relay", True, 0, 8)]
    assert chosen(workers) == ("m0", "least_loaded")
    assert chosen(workers, excluded=frozenset({"m0"})) == ("m1", "only")
    assert choose_worker(workers, "main", frozenset({"m0", "m1"})) is None
    assert choose_worker(workers, "prefill") is None
    assert chosen([main("b", 1, 4), main("a", 1, 4)]) == ("a", "least_loaded")


def test_a_known_prefix_wins_until_load_is_against_it() -> None:
    assert chosen([main("m0", 0), main("m1", 2, prefix_tokens=640)]) == ("m1", "prefix")
    assert chosen([main("m0", 0), main("m1", 3, prefix_tokens=640)]) == ("m0", "prefix_yields")
    assert chosen([main("m0", 0), main("m1", 2, prefix_tokens=32)]) == ("m0", "least_loaded")
    assert chosen([main("m0", 7), main("m1", 8, prefix_tokens=640)]) == ("m0", "prefix_yields"), "a full worker would make it wait"
    assert chosen([main("m0", 8), main("m1", 8, prefix_tokens=640)]) == ("m1", "prefix"), "all are full"
    assert chosen([main("m0", 1, prefix_tokens=64), main("m1", 1, prefix_tokens=128)]) == ("m1", "prefix")


def test_a_named_worker_is_taken_while_it_has_a_row_free() -> None:
    workers = [main("m0", 0), main("m1", 7)]
    assert chosen(workers, preferred="m1") == ("m1", "named")
    assert chosen([main("m0", 0), main("m1", 8)], preferred="m1") == ("m0", "least_loaded")
    assert chosen(workers, preferred="gone") == ("m0", "least_loaded")


@given(FLEETS, ROLES, st.frozensets(st.sampled_from(["w0", "w1", "w2"])), st.sampled_from([None, "w1"]), LIMITS)
def test_every_choice_is_able_and_within_the_slack(
    workers: list[WorkerLoad], role: str, excluded: frozenset[str], preferred: str | None, limits: RoutingLimits
) -> None:
    able = {w.name: w for w in workers if w.role == role and w.ready and w.name not in excluded}
    route = choose_worker(workers, role, excluded, preferred, limits)  # type: ignore[arg-type]
    assert (route is None) == (not able)
    if route is None:
        return
    taken = able[route.name]
    least = min(w.load for w in able.values())
    assert (route.load, route.prefix_tokens) == (taken.load, taken.prefix_tokens)
    match route.reason:
        case "named":
            assert taken.name == preferred
            assert taken.num_held < taken.max_rows
        case "prefix":
            assert taken.load <= least + limits.affinity_slack
            assert taken.prefix_tokens == max(w.prefix_tokens for w in able.values()) >= limits.min_prefix_tokens
        case "prefix_yields":
            assert taken.load == least < max(w.load for w in able.values())
        case _:
            assert taken.load == least
    assert choose_worker(list(reversed(workers)), role, excluded, preferred, limits) == route  # type: ignore[arg-type]


PROMPTS = st.lists(st.integers(0, 2), max_size=24).map(tuple)


@given(st.lists(st.tuples(st.sampled_from(["", "t"]), PROMPTS, st.sampled_from(["a", "b"])), max_size=12), PROMPTS, st.integers(1, 5))
def test_the_memory_knows_exactly_the_longest_whole_chunks(
    sent: list[tuple[str, tuple[int, ...], str]], prompt: tuple[int, ...], chunk: int
) -> None:
    memory = PrefixMemory(chunk, 10_000)
    for tenant, ids, worker in sent:
        memory.sent(fingerprints(tenant, ids, chunk), worker)

    def common(ids: tuple[int, ...]) -> int:
        same = next((i for i, (x, y) in enumerate(zip(ids, prompt, strict=False)) if x != y), min(len(ids), len(prompt)))
        return same // chunk * chunk

    expected: dict[str, int] = {}
    for tenant, ids, worker in sent:
        if tenant == "t" and common(ids):
            expected[worker] = max(expected.get(worker, 0), common(ids))
    assert memory.known(fingerprints("t", prompt, chunk)) == expected
    memory.forget("a")
    expected.pop("a", None)
    assert memory.known(fingerprints("t", prompt, chunk)) == expected


def test_the_memory_is_bounded_and_forgets_ends_of_old_prompts_first() -> None:
    memory = PrefixMemory(4, 6)
    old, new = fingerprints("", range(16), 4), fingerprints("", range(100, 116), 4)
    memory.sent(old, "a")
    memory.sent(new, "b")
    assert len(memory) == 6
    assert memory.known(new) == {"b": 16}
    assert memory.known(old) == {"a": 8}
    assert len(fingerprints("", range(MAX_CHUNKS + 9), 1)) == MAX_CHUNKS


def test_what_is_remembered_costs_little_memory() -> None:
    memory = PrefixMemory(32, 10_000)
    tracemalloc.start()
    try:
        for number in range(500):
            prints = tuple(hashlib.blake2b(f"{number} {chunk}".encode(), digest_size=8).digest() for chunk in range(10))
            for worker in ("prefill-0", "relay-0", "main-0"):
                memory.sent(prints, worker)
        assert len(memory) == 5000
        assert tracemalloc.get_traced_memory()[0] / len(memory) < 200
    finally:
        tracemalloc.stop()
