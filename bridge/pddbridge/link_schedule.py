"""Which of the transfers that share a link sends its next frame. Pure: the time is an argument. Live links and simulators call the same.

Three schedules. All honour classes (urgent, normal, background) and all have the same guard against starvation, counted in turns, so that
it holds whatever the link's rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal

Schedule = Literal["fair", "shortest", "deadline"]
SCHEDULES: Final[tuple[Schedule, ...]] = ("fair", "shortest", "deadline")
# Bounded: it labels a metric. "alone": nobody else waited · "first": by the schedule · "aged": it had waited longest.
TurnReason = Literal["alone", "first", "aged"]


class Priority(IntEnum):
    """Class of a transfer. URGENT: someone waits for it now. BACKGROUND: nobody does, it goes when nothing else wants the link."""

    URGENT = 0
    NORMAL = 1
    BACKGROUND = 2


@dataclass(frozen=True)
class LinkRules:
    """``schedule``: "fair" takes turns, "shortest" lets the transfer with the least left go, "deadline" the one whose deadline is nearest;
    a deadline that is missed already goes behind those that can be met.

    ``aged_turn``: every so many turns goes to whoever has waited longest for a frame; so n transfers that are not background wait for at
    most ``aged_turn`` x n turns, and the schedule rules all but 1/``aged_turn`` of the link. ``background_after_s``: a background transfer
    that had no frame for so long counts as having waited, too; below the time after which a silent transfer is given up.
    """

    schedule: Schedule = "shortest"
    aged_turn: int = 8
    background_after_s: float = 10.0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"LinkRules.schedule: given {self.schedule!r}, allowed {list(SCHEDULES)}")
        if self.aged_turn < 2 or self.background_after_s <= 0:
            given = f"{self.aged_turn} and {self.background_after_s}"
            raise ValueError(f"LinkRules: aged_turn must be at least 2 and background_after_s above 0, given {given}")


@dataclass(frozen=True)
class WaitingTransfer:
    """A transfer with a frame to send. ``remaining_bytes``: of KV that have yet to leave, also those still to be computed.
    ``deadline_s``: when it should be complete, on the clock of ``now_s``; None: nobody said. ``waits_since_s``: when its last frame left,
    or when it came. ``last_turn``: the turn in which that was; the turn of its arrival before.
    """

    priority: Priority
    remaining_bytes: int
    deadline_s: float | None
    waits_since_s: float
    last_turn: int


@dataclass(frozen=True)
class Turn:
    """``index`` into the transfers that were given."""

    index: int
    reason: TurnReason


def choose_transfer(waiting: Sequence[WaitingTransfer], rules: LinkRules, turn: int, now_s: float) -> Turn:
    """Who sends the frame of turn number ``turn``, which counts from 1. Raises ValueError when nobody waits."""
    if not waiting:
        raise ValueError("choose_transfer: nobody waits")
    if len(waiting) == 1:
        return Turn(0, "alone")
    if turn % rules.aged_turn == 0:
        aged = [i for i, one in enumerate(waiting) if _may_age(one, rules, now_s)]
        if aged:
            return Turn(min(aged, key=lambda i: (waiting[i].last_turn, waiting[i].waits_since_s)), "aged")
    return Turn(min(range(len(waiting)), key=lambda i: _rank(waiting[i], rules.schedule, now_s)), "first")


def _may_age(one: WaitingTransfer, rules: LinkRules, now_s: float) -> bool:
    return one.priority is not Priority.BACKGROUND or now_s - one.waits_since_s >= rules.background_after_s


def _rank(one: WaitingTransfer, schedule: Schedule, now_s: float) -> tuple[float, ...]:
    """Lowest goes first. Among equals whoever had no turn for longest, so that equals share."""
    match schedule:
        case "fair":
            wanted: tuple[float, ...] = ()
        case "shortest":
            wanted = (one.remaining_bytes,)
        case "deadline":
            missed = one.deadline_s is not None and one.deadline_s < now_s
            by_s = one.deadline_s if one.deadline_s is not None and not missed else float("inf")
            wanted = (float(missed), by_s, one.remaining_bytes)
    return (float(one.priority), *wanted, one.last_turn, one.waits_since_s)
