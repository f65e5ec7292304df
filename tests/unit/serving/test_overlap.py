"""Overlap: a relay and a main that race under arbitrary delays, and when they run at known speeds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.handoff_config import HandoffConfig
from pdd.policy_config import PolicyConfig
from pdd.serving.handoff_figures import HandoffFigures
from pdd.serving.overlap_race import OverlapRace
from tests.support.overlap_model import Race, relay_token

MOVES = ("relay steps", "relay takes", "relay heard", "main steps", "main takes", "main heard")
RARE = ("main lost", "relay lost")


def move(race: Race, name: str) -> None:
    part, what = name.split()
    worker = race.workers[part]  # type: ignore[index]
    match what:
        case "steps":
            worker.step()
        case "takes":
            worker.take()
        case "heard":
            race.hear(part)  # type: ignore[arg-type]
        case "lost":
            race.lose_main() if part == "main" else race.lose_relay()


@settings(max_examples=120, deadline=None)
@given(
    differs=st.frozensets(st.integers(0, 29), max_size=6),
    before=st.integers(0, 40),
    moves=st.lists(st.tuples(st.sampled_from(MOVES), st.sampled_from((0.0, 0.003, 0.02))), max_size=300),
    lost=st.none() | st.tuples(st.sampled_from(RARE), st.integers(0, 200)),
    order=st.permutations(MOVES),
    max_tokens=st.integers(1, 4),
)
def test_whatever_the_delays_the_log_is_one_request(
    differs: frozenset[int], before: int, moves: list[tuple[str, float]], lost: tuple[str, int] | None, order: list[str], max_tokens: int
) -> None:
    """Every accepted token follows from the log before it, nothing is delivered twice or left out, and everybody comes to an end."""
    rules = HandoffConfig(max_tokens=max_tokens, pace=1.5)
    race = Race(differs, policy=PolicyConfig(handoff="overlap", catch_up_chunk=4, handoff_rules=rules))
    for _ in range(before):
        move(race, "relay steps")
        move(race, "relay heard")
    race.kv_complete()
    for number, (name, seconds) in enumerate(moves):
        if lost is not None and lost[1] == number:
            move(race, lost[0])
        race.clock.advance(seconds)
        move(race, name)
    for _ in range(400):
        for name in order:
            move(race, name)
        race.clock.advance(0.001)
    assert race.finished
    assert [record.token_id for _, delta in race.delivered for record in delta.records] == race.log
    assert race.origins == sorted(race.origins, reverse=True), "relay, then main, never back"
    assert len(race.log) == race.max_tokens
    for worker in race.workers.values():
        assert worker.num_proposed <= race.max_tokens * (1 + race.timeline.handoff_rewinds)
        assert worker.proposed_when_sealed == 0
    relayed = race.origins.count("relay")
    if not differs:
        assert race.timeline.handoff_rewinds == 0
        assert race.log == fresh(race.max_tokens)
    elif relayed == 0:
        assert race.timeline.handoff_rewinds == 0


def test_main_s_next_token_after_one_that_lost_is_not_accepted() -> None:
    """The relay is first at position 0; main chose otherwise there, and its position 1 comes when the log ends just there."""
    race = Race(frozenset({0}))
    race.kv_complete()
    for name in ("main takes", "main steps", "main steps", "relay steps", "relay heard", "main heard", "main heard", "main heard"):
        move(race, name)
    assert race.log == fresh(1)
    assert race.timeline.handoff_rewinds == 1
    for name in ("main takes", "main steps", "main heard", "main heard"):
        move(race, name)
    assert race.log == fresh(2), "after it was rewound it counts again"
    assert race.origins == ["relay", "main"]


def fresh(length: int) -> list[int]:
    log: list[int] = []
    while len(log) < length:
        log.append(relay_token(log))
    return log


def run_timed(
    race: Race,
    relay_itl_s: float,
    main_itl_s: float,
    one_way_s: float,
    kv_at_s: float,
    step_s: float = 0.001,
    main_steps: Iterator[float] | None = None,
) -> None:
    """Both at constant speed, main ``one_way_s`` away; the relay next door. ``main_steps``: main's one after another, not constant."""
    due = {"relay": relay_itl_s, "main": main_itl_s}
    itl = dict(due)
    arrivals: list[tuple[float, str]] = []  # of messages to and from main
    seen = {"in": 0, "out": 0}
    while not race.finished and race.clock() < 60:
        race.clock.advance(step_s)
        now = race.clock()
        if now >= kv_at_s and not race.main_has_kv:
            race.kv_complete()
        main, relay = race.workers["main"], race.workers["relay"]
        while relay.inbox:
            relay.take()
        for kind, queue in (("in", main.inbox), ("out", main.outbox)):
            known = sum(1 for _, k in arrivals if k == kind)
            arrivals += [(now + one_way_s, kind)] * (len(queue) - known)
        while arrivals and arrivals[0][0] <= now:
            _, kind = arrivals.pop(0)
            seen[kind] += 1
            main.take() if kind == "in" else race.hear("main")
        for part, at in due.items():
            if now >= at:
                race.workers[part].step()  # type: ignore[index]
                due[part] = now + (next(main_steps) if part == "main" and main_steps is not None else itl[part])
        while relay.outbox:
            race.hear("relay")


def gaps(race: Race) -> list[float]:
    """Between tokens as the reader gets them, but for the last, which comes with everything that was held back."""
    times = [at for at, _ in race.delivered]
    return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize("relay_itl_s", [0.02, 0.035])
@pytest.mark.parametrize("main_itl_s", [0.01, 0.02, 0.034])
@pytest.mark.parametrize("one_way_s", [0.005, 0.025, 0.08])
def test_no_gap_shows_however_fast_main_is(relay_itl_s: float, main_itl_s: float, one_way_s: float) -> None:
    race = Race(frozenset(), max_tokens=160)
    run_timed(race, relay_itl_s, main_itl_s, one_way_s, kv_at_s=0.31)
    assert race.log == fresh(160)
    assert race.origins.count("main") > 0
    assert max(gaps(race)) <= 1.5 * max(relay_itl_s, main_itl_s) + 0.002
    assert race.timeline.handoff_rewinds == 0
    assert race.metrics.registry.get_sample_value("pdd:handoff_overlap_total", {"end": "bounded"}) is None


def test_a_relay_is_let_go_as_soon_as_main_s_delay_is_covered() -> None:
    """50 ms away and as slow as the relay, main is about 120 ms late; each held token covers 5 ms, and half as much again is to be covered
    of a main that nothing is known of.
    """
    race = Race(frozenset(), max_tokens=160)
    run_timed(race, 0.02, 0.02, 0.05, kv_at_s=0.31)
    assert race.metrics.registry.get_sample_value("pdd:handoff_overlap_total", {"end": "covered"}) == 1
    assert 30 <= race.origins.count("relay") - 15 <= 38, "26 where the first delays are taken at their word"


def test_without_pacing_a_main_as_slow_as_the_relay_leaves_a_gap_and_is_counted() -> None:
    race = Race(frozenset(), max_tokens=160, policy=PolicyConfig(handoff="overlap", handoff_rules=HandoffConfig(pace=1.0, max_tokens=20)))
    run_timed(race, 0.02, 0.02, 0.05, kv_at_s=0.31)
    assert race.log == fresh(160)
    assert race.metrics.registry.get_sample_value("pdd:handoff_overlap_total", {"end": "bounded"}) == 1
    assert max(gaps(race)) > 0.1
    assert 20 <= race.origins.count("relay") - 15 <= 22


def known(relay_itl_s: float, main_itl_s: float, delay_s: float) -> HandoffFigures:
    figures = HandoffFigures()
    for _ in range(20):
        figures.gap("relay-0", relay_itl_s)
        figures.gap("main-0", main_itl_s)
    for _ in range(400):
        figures.overlap("main-0", [delay_s])
    return figures


def test_while_main_s_kv_is_under_way_as_much_is_laid_by_as_main_will_be_late() -> None:
    """Main takes 30 ms a token, the relay 20, and main is known to be 0.2 s late. The reader gets the relay's at main's pace until 0.2 s
    are in hand, then as they come; when main has its KV three of its tokens are enough.
    """
    policy = PolicyConfig(handoff="overlap")
    race = Race(frozenset(), max_tokens=160, policy=policy, figures=known(0.02, 0.03, 0.2))
    run_timed(race, 0.02, 0.03, 0.02, kv_at_s=1.01)
    first_s = race.delivered[0][0]
    assert first_s == pytest.approx(0.02), "the first token is not held back"
    assert gaps(race)[:13] == pytest.approx([0.03] * 13, abs=0.002)
    assert gaps(race)[35:40] == pytest.approx([0.02] * 5, abs=0.002), "0.2 s are in hand"
    assert max(gaps(race)) <= 1.25 * 0.03 + 0.002
    timeline = race.timeline
    assert timeline.handoff_cover_s is not None
    assert timeline.handoff_left_s is not None
    assert 0.17 <= timeline.handoff_cover_s <= 0.4
    assert 0.05 <= timeline.handoff_left_s <= timeline.handoff_cover_s
    unknown = Race(frozenset(), max_tokens=160, policy=policy)
    run_timed(unknown, 0.02, 0.03, 0.02, kv_at_s=1.01)
    assert gaps(unknown)[:30] == pytest.approx([0.02] * 30, abs=0.002)
    assert race.origins.count("relay") <= unknown.origins.count("relay") + 2


@pytest.mark.parametrize("phase", range(7))
def test_a_main_that_is_late_now_and_then_is_covered_once_that_is_known(phase: int) -> None:
    """Every seventh step takes 150 ms instead of 30. Three quick ones say nothing of that; earlier overlaps do."""

    def steps() -> Iterator[float]:
        return islice(cycle([0.03] * 6 + [0.15]), phase, None)

    figures = HandoffFigures()
    for _ in range(4):
        learning = Race(frozenset(), max_tokens=300, figures=figures)
        run_timed(learning, 0.025, 0.03, 0.02, kv_at_s=0.51, main_steps=steps())
    race = Race(frozenset(), max_tokens=300, figures=figures)
    run_timed(race, 0.025, 0.03, 0.02, kv_at_s=0.51, main_steps=steps())
    change = race.origins.index("main")
    assert gaps(race)[change - 1] <= 1.5 * 0.03
    assert race.metrics.registry.get_sample_value("pdd:handoff_overlap_total", {"end": "bounded"}) is None


def test_nothing_is_laid_by_where_no_main_is_to_come() -> None:
    race = Race(frozenset(), max_tokens=60, figures=known(0.02, 0.03, 0.2))
    race.lose_main()
    run_timed(race, 0.02, 0.03, 0.02, kv_at_s=1.01)
    assert race.origins == ["relay"] * 60
    assert gaps(race)[:50] == pytest.approx([0.02] * 50, abs=0.002)


def test_what_was_laid_by_goes_out_when_main_is_lost() -> None:
    race = Race(frozenset(), max_tokens=60, figures=known(0.02, 0.03, 0.2))
    for _ in range(10):
        race.clock.advance(0.02)
        move(race, "relay steps")
        move(race, "relay heard")
    assert len(race.log) - len(race.delivered) >= 3
    race.lose_main()
    for _ in range(20):
        race.clock.advance(0.02)
        move(race, "relay steps")
        move(race, "relay heard")
    assert len(race.log) == len(race.delivered)


def test_a_silent_main_does_not_stop_the_relay() -> None:
    rules = HandoffConfig(max_tokens=8, max_cover_s=0.3)
    race = Race(frozenset(), max_tokens=160, policy=PolicyConfig(handoff="overlap", handoff_rules=rules))
    run_timed(race, 0.02, 1e9, 0.02, kv_at_s=0.3)
    assert race.log == fresh(160)
    assert race.origins == ["relay"] * 160
    held_s = max(at - n * 0.02 for n, (at, _) in enumerate(race.delivered, 1))
    assert 0.25 < held_s <= 0.35, "what is held back is bounded"
    assert race.delivered[-1][0] == pytest.approx(160 * 0.02, abs=0.2), "the end is not held back"


def test_a_faster_main_is_first_by_itself_without_pacing() -> None:
    race = Race(frozenset({40, 41}), max_tokens=160, policy=PolicyConfig(handoff="overlap", handoff_rules=HandoffConfig(pace=1.0)))
    run_timed(race, 0.03, 0.01, 0.02, kv_at_s=0.3)
    assert race.metrics.registry.get_sample_value("pdd:handoff_overlap_total", {"end": "main_first"}) == 1
    assert max(gaps(race)) <= 0.032


def test_proposals_that_rest_on_a_token_that_lost_do_not_count() -> None:
    race = OverlapRace(10, 0.0)
    log = list(range(100, 113))
    for _ in range(3):
        race.accepted(1.0)
    assert race.counts(10, 110, log, 1.5)
    assert not race.counts(11, 5, log, 1.6)
    assert not race.counts(13, 7, log, 1.7), "the next position of the log, but after a token that is not in it"
    race.ingested(11)
    assert not race.counts(13, 7, log, 1.8), "it was given the log up to where it left it, not beyond"
    race.ingested(13)
    assert race.counts(13, 7, log, 1.9)
    assert (race.num_duplicates, race.num_rewinds) == (1, 1)


def test_delay_is_the_worst_of_the_latest_and_grows_in_silence() -> None:
    race = OverlapRace(10, 5.0)
    assert race.delay_s(9.0, is_known=True) is None
    for at in (5.1, 5.2, 5.3, 5.4, 5.5):
        race.accepted(at)
    log = list(range(100, 115))
    for number, (position, at) in enumerate(((10, 5.9), (11, 5.8), (12, 5.5), (13, 5.5), (14, 5.6))):
        assert (race.delay_s(at, is_known=True) is None) == (number < 2)
        assert (race.delay_s(at, is_known=False) is None) == (number < 3)
        race.counts(position, 100 + position, log, at)
    # since 5.1, 5.2, 5.3 and 5.4, and the first of the four does not count any more; what it took to read the log never did
    assert race.delay_s(5.6, is_known=False) == pytest.approx(0.3)
    assert race.delay_s(7.0, is_known=False) == pytest.approx(1.4)
    assert race.counts(15, 115, log, 5.8), "with this one it is first"
    assert race.delays_s == pytest.approx([0.7, 0.3, 0.2, 0.2, 0.3]), "and it was late by so much, too"


def test_what_is_usual_outlasts_what_is_so_just_now() -> None:
    figures = HandoffFigures()
    assert figures.steady_itl_s(["main-0"]) is None
    assert figures.usual_delay_s("main-0") is None
    for _ in range(3000):
        figures.gap("main-0", 0.05)
        figures.gap("relay-0", 0.03)
    for _ in range(300):
        figures.gap("main-0", 0.12)
    assert figures.itl_s("main-0") == pytest.approx(0.12)
    assert figures.steady_itl_s(["main-0"]) == pytest.approx(0.05, rel=0.03)
    assert figures.steady_itl_s(["relay-0", "main-0", "unheard-of"]) == pytest.approx(0.05, rel=0.03)
    for _ in range(100):
        figures.overlap("main-0", [0.1] * 9 + [0.4])
    assert figures.usual_delay_s("main-0") == pytest.approx(1.05 * 0.4, rel=0.03)


def test_of_few_overlaps_a_longer_delay_is_taken_to_be_usual() -> None:
    figures = HandoffFigures()
    figures.overlap("main-0", [])
    assert figures.usual_delay_s("main-0") is None, "an overlap that ended before main proposed says nothing"
    usual_s = []
    for _ in range(25):
        figures.overlap("main-0", [0.2])
        usual_s.append(figures.usual_delay_s("main-0"))
    assert usual_s[0] == pytest.approx(1.5 * 0.2, rel=0.03)
    assert usual_s[3] == pytest.approx(1.25 * 0.2, rel=0.03)
    assert usual_s[24] == pytest.approx(1.1 * 0.2, rel=0.03)
