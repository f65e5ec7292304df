"""The handoff microbenchmark's arithmetic and checks; the run itself is in tests/system."""

from __future__ import annotations

import pytest
from rich.console import Console

from pdd.bench import handoff
from pdd.bench.handoff import Plan
from pdd.bench.handoff_rig import Handoff
from pdd.config import EmulatedLink, LaunchConfig
from tests.support.deployments import launch_config

LINK = EmulatedLink(rate_mbit_s=100, rtt_ms=20, jitter_ms=5)


def at(started_s: float, ended_s: float, payload_bytes: int = 7) -> Handoff:
    return Handoff(ended_s - started_s, payload_bytes, started_s, ended_s)


def test_a_row_is_the_samples_statistics() -> None:
    handoffs = [at(0, 0.1), at(1, 1.3, 9), at(2, 2.2)]
    row = handoff._row(10, "kv", handoffs, [0.5, 0.7, 0.6], 0.02)
    assert (row.tokens, row.route, row.rounds, row.payload_bytes) == (10, "kv", 3, 9)
    assert row.mean_s == pytest.approx(0.2)
    assert row.p50_s == pytest.approx(0.2)
    assert row.p99_s == pytest.approx(0.298)
    assert row.max_s == pytest.approx(0.3)
    assert row.std_s == pytest.approx(0.1), "of a sample, so over n - 1"
    assert row.neighbour_gap_s == pytest.approx(0.6)
    assert row.neighbour_itl_s == pytest.approx(0.02)


def test_a_neighbour_s_gap_counts_for_the_handoff_it_overlaps_and_the_worst_neighbour_counts() -> None:
    calm = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    hurt = [0.0, 0.1, 0.35, 0.45, 0.55, 0.65, 0.7]
    assert handoff._worst_gaps([calm, hurt], [at(0.15, 0.25), at(0.51, 0.52), at(5, 6)]) == pytest.approx([0.25, 0.1, 0.0])
    assert handoff._usual_gap([calm, hurt], [at(0.15, 0.25)]) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no neighbour"):
        handoff._usual_gap([[0.0, 1.0]], [at(0.2, 0.3)])


def test_the_link_is_put_between_relay_and_main_and_other_links_stay() -> None:
    config = launch_config("m")
    over = handoff._over(config, LINK)
    assert [(link.emulate, link.codec) for link in over.links] == [(LINK, "raw")]
    assert handoff._names(over) == ("relay-0", "prefill-0", "main-0")
    third = config.model_dump(mode="json")
    third["sites"].append("c")
    third["links"].append({"between": ["a", "c"], "emulate": {"rate_mbit_s": 1}})
    links = handoff._over(LaunchConfig.model_validate(third), LINK).links
    assert {link.between: link.emulate.rate_mbit_s for link in links if link.emulate} == {("a", "c"): 1, ("a", "b"): 100}


def test_what_cannot_be_measured_is_refused_by_name(tmp_path) -> None:
    one_site = launch_config("m").model_dump(mode="json")
    for worker in one_site["workers"]:
        worker["site"] = "a"
    with pytest.raises(ValueError, match="both at site 'a'"):
        handoff._over(LaunchConfig.model_validate(one_site), LINK)
    with pytest.raises(ValueError, match="max_context_tokens of 758 on prefill-0, relay-0, main-0"):
        handoff.run(launch_config("m", max_context=512), tmp_path, Plan(LINK), None, None)  # type: ignore[arg-type]
    for fields in ({"tokens": ()}, {"tokens": (0,)}, {"rounds": 2}, {"num_neighbours": 0}):
        with pytest.raises(ValueError, match=f"^{next(iter(fields))}: given"):
            Plan(LINK, **fields)


class Instant:
    """A rig whose handoffs take no time but are counted."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []

    async def hand_over(self, route: str, num_tokens: int) -> Handoff:
        self.done.append((route, num_tokens))
        return at(0, 0.1)


@pytest.mark.parametrize(("limit_s", "rounds"), [(60.0, 5), (-1.0, 3)])
async def test_rounds_are_whole_take_turns_and_end_when_time_is_up(limit_s: float, rounds: int) -> None:
    rig = Instant()
    into: dict = {(10, "ids"): [], (10, "kv"): [], (50, "ids"): [], (50, "kv"): []}
    await handoff._rounds(rig, 5, 3, limit_s, into, Console(quiet=True))  # type: ignore[arg-type]
    assert rig.done == [("ids", 10), ("kv", 10), ("ids", 50), ("kv", 50)] * rounds
    assert {len(handoffs) for handoffs in into.values()} == {rounds}
