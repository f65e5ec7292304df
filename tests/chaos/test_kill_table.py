"""The design's failure table on real processes: kill each part in each state of a request's life. A handful here, all of it by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from pdd.chaos.command import workplace
from pdd.chaos.designed import VICTIMS, Victim
from pdd.chaos.expected import ExpectedAnswers
from pdd.chaos.kill_table import Cell, run_table
from pdd.chaos.run import Rig
from pdd.chaos.shapes import DEFAULT_ENGINES
from pdd.chaos.states import STATES, State

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def rig(cache_dir: Path) -> Iterator[tuple[Rig, ExpectedAnswers]]:
    with workplace(cache_dir, DEFAULT_ENGINES) as (model_dir, answers):
        with Rig("lean", model_dir, cache_dir, DEFAULT_ENGINES) as rig:
            yield rig, answers
    assert rig.orphans == []


def kill(rig: tuple[Rig, ExpectedAnswers], state: State, victim: Victim) -> Cell:
    (cell,) = run_table(*rig, Console(width=200), [state], [victim])
    assert cell.why is None, cell
    return cell


def test_main_dies_before_the_handoff_and_the_relay_goes_on(rig: tuple[Rig, ExpectedAnswers]) -> None:
    cell = kill(rig, "relaying", "main")
    assert cell.main_tokens == 0
    assert cell.relay_tokens == 300


def test_the_kv_link_dies_and_the_transfer_resumes(rig: tuple[Rig, ExpectedAnswers]) -> None:
    assert kill(rig, "awaiting_kv", "kv").fallbacks == 0


def test_the_relay_dies_sealed_and_main_has_all_it_needs(rig: tuple[Rig, ExpectedAnswers]) -> None:
    cell = kill(rig, "sealed", "relay")
    assert (cell.relay_tokens, cell.main_tokens) == (350, 120)


def test_main_dies_after_the_handoff_and_another_goes_on_from_the_log(rig: tuple[Rig, ExpectedAnswers]) -> None:
    cell = kill(rig, "main", "main")
    assert cell.main_tokens >= 5
    assert cell.relay_tokens > 20


@pytest.mark.slow
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("state", [driver.state for driver in STATES])
def test_every_cell(rig: tuple[Rig, ExpectedAnswers], state: State, victim: Victim) -> None:
    kill(rig, state, victim)
