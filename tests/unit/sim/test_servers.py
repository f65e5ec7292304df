"""Shared servers, links and caches of the simulator against brute force."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.policy.link_schedule import Priority
from pdd.sim.cache import PrefixCache, beginning
from pdd.sim.costs import EngineCost
from pdd.sim.goodput import SeenRate
from pdd.sim.link import FairLink, ShortestLink
from pdd.sim.prefill import PrefillEngine
from pdd.sim.server import Host, SharedServer
from pdd.sim.spec import HostSpec, Jitter, RoleSpec

Jobs = Sequence[tuple[float, float]]  # (arrival, work), in order of arrival
_JOBS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=8).map(
    lambda jobs: sorted((float(arrival), float(work)) for arrival, work in jobs)
)


def _simulated(jobs: Jobs, serve: SharedServer | FairLink | ShortestLink, env: simpy.Environment) -> list[float]:
    ends = [0.0] * len(jobs)

    def one(index: int, arrival: float, work: float) -> object:
        yield env.timeout(arrival)
        if isinstance(serve, SharedServer):
            yield serve.add(work).done
        else:
            done = env.event()
            serve.feed(serve.open(work, done.succeed), work)
            yield done
        ends[index] = env.now

    for index, (arrival, work) in enumerate(jobs):
        env.process(one(index, arrival, work))  # type: ignore[arg-type]
    env.run()
    return ends


def _brute(jobs: Jobs, rate_of_each: float, total: float, shortest: bool) -> list[float]:
    """From event to event: all alike, each at most ``rate_of_each``; or the shortest first, as many as the total allows."""
    left = [work for _, work in jobs]
    ends = [0.0] * len(jobs)
    now = 0.0
    while any(work > 1e-9 for work in left):
        here = [i for i, (arrival, _) in enumerate(jobs) if arrival <= now and left[i] > 1e-9]
        coming = [arrival for arrival, _ in jobs if arrival > now]
        if shortest:
            here = sorted(here, key=lambda i: (left[i], i))[: max(1, round(total / rate_of_each))]
        rate = rate_of_each if shortest else min(rate_of_each, total / max(1, len(here)))
        steps = [left[i] / rate for i in here] + [arrival - now for arrival in coming]
        step = min(steps)
        for i in here:
            left[i] -= step * rate
            if left[i] <= 1e-9:
                left[i] = 0.0
                ends[i] = now + step
        now += step
    return ends


@settings(max_examples=150, deadline=None)
@given(_JOBS)
def test_a_shared_server_serves_all_alike(jobs: Jobs) -> None:
    env = simpy.Environment()
    assert _simulated(jobs, SharedServer(env, lambda n, _: 2.0 / n), env) == pytest.approx(_brute(jobs, 2.0, 2.0, shortest=False))


@settings(max_examples=150, deadline=None)
@given(_JOBS, st.sampled_from([None, 1.0]))
def test_a_fair_link_gives_each_at_most_a_flow(jobs: Jobs, flow: float | None) -> None:
    env = simpy.Environment()
    link = FairLink(env, 2.0, flow)
    assert _simulated(jobs, link, env) == pytest.approx(_brute(jobs, flow or 2.0, 2.0, shortest=False))
    assert link.sent_bytes == pytest.approx(sum(work for _, work in jobs))
    assert (link.queued_bytes, link.num_transfers) == (0.0, 0)


@settings(max_examples=150, deadline=None)
@given(_JOBS, st.sampled_from([None, 1.0]))
def test_the_shortest_goes_first(jobs: Jobs, flow: float | None) -> None:
    env = simpy.Environment()
    link = ShortestLink(env, 2.0, flow)
    simulated, brute = _simulated(jobs, link, env), _brute(jobs, flow or 2.0, 2.0, shortest=True)
    assert sorted(simulated) == pytest.approx(sorted(brute))  # among equals the order is free
    assert link.sent_bytes == pytest.approx(sum(work for _, work in jobs))


def test_a_prompt_that_nobody_wants_any_more_has_no_further_step() -> None:
    env = simpy.Environment()
    cost = EngineCost(0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)
    server = SharedServer(env, lambda n, _: 1.0)
    engine = PrefillEngine(RoleSpec(1, cost, 8, 1000, step_tokens=4), server, Jitter())
    told: list[str] = []
    gone = engine.add(12, 0, lambda tokens: told.append(f"gone {tokens}"), lambda: told.append("gone"))
    env.run(until=5.0)  # a step, and one second of the next
    other = engine.add(2, 0, lambda tokens: told.append(f"other {tokens}"), lambda: told.append(f"other at {env.now:g}"))
    assert engine.cancel(gone)
    env.run()
    assert told == ["gone 4", "other 2", "other at 10"]
    assert (gone.behind, server.num_jobs) == (8, 0)
    assert not engine.cancel(gone)
    assert not engine.cancel(other)


def test_what_is_cancelled_gives_way_and_says_what_it_got() -> None:
    env = simpy.Environment()
    server = SharedServer(env, lambda n, _: 1.0 / n)
    long, short = server.add(10.0), server.add(4.0)
    env.run(until=4.0)
    assert server.cancel(long) == pytest.approx(2.0)
    env.run(until=short.done)
    assert env.now == pytest.approx(6.0)
    assert not long.done.triggered
    assert server.cancel(short) == pytest.approx(4.0)
    assert server.num_jobs == 0


def test_engines_of_one_host_slow_each_other_down_as_measured() -> None:
    env = simpy.Environment()
    spec = HostSpec(
        {frozenset({"prefill", "main"}): {"prefill": 2.0, "main": 1.25}, frozenset({"prefill", "relay", "main"}): {"prefill": 4.0}},
        {"link": {"main": 2.0}},
    )
    host = Host(spec)

    def add(role: str) -> SharedServer:
        server = SharedServer(env, lambda n, _: host.speed(role))
        host.add(role, server)
        return server

    servers = {role: add(role) for role in ("prefill", "relay", "main")}
    link_busy = False
    host.watch("link", lambda: link_busy)
    prefill = servers["prefill"].add(10.0)
    env.run(until=1.0)  # 1 done, alone
    main = servers["main"].add(10.0)
    env.run(until=3.0)  # 1 more, at half speed
    assert servers["prefill"].got(prefill) == pytest.approx(2.0)
    assert servers["main"].got(main) == pytest.approx(1.6)
    servers["relay"].add(100.0)
    env.run(until=7.0)  # 1 more of prefill; main, of whom nothing is known beside both, goes on as beside prefill
    assert servers["prefill"].got(prefill) == pytest.approx(3.0)
    assert servers["main"].got(main) == pytest.approx(4.8)
    link_busy = True
    host.look()
    env.run(until=9.0)
    assert servers["prefill"].got(prefill) == pytest.approx(3.5)
    assert servers["main"].got(main) == pytest.approx(4.8 + 2 / 2.25)  # a quarter for prefill, and as much again for the link


@pytest.mark.parametrize("make", [FairLink, ShortestLink])
def test_an_engine_is_slow_beside_a_link_only_while_that_moves_something(make: type[FairLink] | type[ShortestLink]) -> None:
    env = simpy.Environment()
    host = Host(HostSpec({}, {"link": {"prefill": 2.0}}))
    server = SharedServer(env, lambda n, _: host.speed("prefill"))
    host.add("prefill", server)
    link = make(env, 2.0, None)
    host.watch("link", lambda: link.busy)
    link.on_busy = host.look
    job = server.add(100.0)
    transfer = link.open(8.0, env.event().succeed)
    env.run(until=1.0)
    link.feed(transfer, 4.0)  # two seconds; then it waits for more
    env.run(until=5.0)
    assert server.got(job) == pytest.approx(1 + 1 + 2)
    link.feed(transfer, 4.0)
    env.run(until=6.0)
    link.cancel(transfer)
    env.run(until=7.0)
    assert server.got(job) == pytest.approx(4 + 0.5 + 1)


def test_who_leads_is_served_first() -> None:
    env = simpy.Environment()
    server = SharedServer(env, lambda n, _: 1.0)
    first = server.add(3.0)
    env.run(until=0.25)
    second = server.add(2.0, lead=1.5)
    assert server.got(second) == 0
    assert server.until(second, 1) == pytest.approx(2.5)
    env.run(until=second.done)
    assert env.now == pytest.approx(3.75)
    assert first.done.triggered


@pytest.mark.parametrize("make", [FairLink, ShortestLink])
def test_a_transfer_waits_for_what_is_computed_and_lets_others_go_meanwhile(make: type[FairLink] | type[ShortestLink]) -> None:
    env = simpy.Environment()
    link = make(env, 2.0, None)
    early_done, late_done = env.event(), env.event()
    early, late = link.open(6.0, early_done.succeed), link.open(8.0, late_done.succeed)
    link.feed(early, 2.0)
    link.feed(late, 8.0)
    env.run(until=4.0)  # 2 of early and 6 of late, in either order
    assert link.num_transfers == 2
    env.run(until=late_done)
    assert env.now == pytest.approx(5.0)
    link.feed(early, 4.0)
    env.run(until=early_done)
    assert env.now == pytest.approx(7.0)
    assert (link.queued_bytes, link.num_transfers, link.busy) == (0.0, 0, False)
    gone = link.open(4.0, env.event().succeed)
    link.feed(gone, 4.0)
    env.run(until=7.5)
    link.cancel(gone)
    assert (link.queued_bytes, link.num_transfers, link.busy) == (0.0, 0, False)
    assert link.sent_bytes == pytest.approx(15.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 2), min_size=1, max_size=4)), max_size=30))
def test_a_cache_hits_no_more_than_was_put_and_keeps_to_its_size(puts: list[tuple[int, list[int]]]) -> None:
    cache = PrefixCache(60)
    seen: set[tuple[tuple[int, ...], int]] = set()
    for _, path in puts:
        chain = tuple((tuple(path[: depth + 1]), 7) for depth in range(len(path)))
        hit = cache.hit_tokens(chain)
        longest = max((len(chain[: n + 1]) for n in range(len(chain)) if chain[n] in seen), default=0)
        assert hit <= 7 * longest
        cache.put(chain)
        seen.update(chain)
        assert cache.num_tokens <= max(60, 7)
        assert cache.peek_tokens(chain[:1]) == 7  # the beginning of what came last is never what leaves


def test_a_part_that_grows_is_hit_as_far_as_it_was_put() -> None:
    cache = PrefixCache(1000)
    cache.put((("s", 10), ("a", 5)))
    assert cache.hit_tokens((("s", 10), ("a", 9))) == 15
    assert cache.hit_tokens((("s", 20), ("a", 5))) == 10
    cache.put((("s", 10), ("a", 9)))
    assert cache.num_tokens == 19
    assert [beginning((("s", 10), ("a", 9)), tokens) for tokens in (0, 4, 10, 12)] == [
        (),
        (("s", 4),),
        (("s", 10),),
        (("s", 10), ("a", 2)),
    ]


def test_whoever_is_waited_for_goes_first_and_what_nobody_waits_for_last() -> None:
    env = simpy.Environment()
    link = ShortestLink(env, 2.0, None)
    ended: dict[str, float] = {}

    def told(name: str) -> None:
        ended[name] = env.now

    wanted = {"normal": (2.0, Priority.NORMAL), "urgent": (8.0, Priority.URGENT), "put off": (1.0, Priority.URGENT)}
    opened = {name: link.open(work, lambda name=name: told(name), priority) for name, (work, priority) in wanted.items()}
    for name, transfer in opened.items():
        link.feed(transfer, wanted[name][0])
    link.set_priority(opened["put off"], Priority.BACKGROUND)
    env.run()
    assert ended == pytest.approx({"urgent": 4.0, "normal": 5.0, "put off": 5.5})
    link.set_priority(opened["urgent"], Priority.BACKGROUND)  # no effect on one that is over


def test_a_sender_sees_less_of_the_rate_the_shorter_its_transfers_are() -> None:
    """0.3 s of it, then half a second of nothing; or the next right after, which goes while the last is acknowledged."""
    for pause_s, share in ((0.5, 0.3 / 0.4), (0.0, 1.0)):
        env = simpy.Environment()
        link = ShortestLink(env, 10.0, None)
        seen = SeenRate(lambda env=env: env.now, lambda link=link: link.busy, 0.1)
        link.on_busy = seen.look
        assert seen.share == 1.0
        for _ in range(20):
            link.feed(link.open(3.0, env.event().succeed), 3.0)
            env.run(env.now + 0.3 + pause_s)
        link.feed(link.open(3.0, env.event().succeed), 3.0)
        env.run()
        assert seen.share == pytest.approx(share, abs=0.04)
