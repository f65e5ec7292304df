"""One run of chaos as data: a seed, a shape, requests, faults. Drawn purely, so a seed can be printed, read and run again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pdd.chaos.shapes import SHAPES, Shape, ShapeName
from pdd.chaos.traffic import Ask, draw_traffic

# What is left of a victim: killed and started again, stopped for a while (a machine that hangs), or a link that misbehaves.
FaultKind = Literal["kill", "pause", "cut", "reset", "half_close", "stall", "flip", "black_hole", "slow"]
LINK_KINDS: Final[tuple[FaultKind, ...]] = ("cut", "reset", "half_close", "stall", "flip", "black_hole", "slow")
WINDOW_S: Final = 4.0


@dataclass(frozen=True)
class Moment:
    """When: ``at_s`` from the start of the run, or as soon as request ``request`` has ``tokens`` tokens, whichever is given."""

    at_s: float | None = None
    request: int | None = None
    tokens: int = 0

    def text(self) -> str:
        return f"{self.at_s:6.2f} s" if self.at_s is not None else f"when request {self.request} has {self.tokens} tokens"


@dataclass(frozen=True)
class ChaosFault:
    """``victim``: a worker, "coordinator" or "link" (killed: its emulator; otherwise what it carries) · ``lasts_s``: of a pause, a stall, a
    black hole, a slow link; after a kill, until it is started again · ``rate_mbit_s``: of a slow link · ``port``: what it happens to.
    """

    kind: FaultKind
    victim: str
    moment: Moment
    lasts_s: float
    rate_mbit_s: float | None = None
    port: Literal["control", "kv"] | None = None
    direction: Literal["there", "back", "both"] = "both"

    @property
    def label(self) -> str:
        """For counting: what was done to what kind of part."""
        part = self.victim.split("-")[0]
        return f"{self.kind} {part}" + (f" {self.port}" if self.port is not None else "")

    def text(self) -> str:
        """One line of a printed plan."""
        rate = "" if self.rate_mbit_s is None else f" at {self.rate_mbit_s:g} Mbit/s"
        return f"{self.moment.text()}  {self.label} ({self.victim}, {self.direction}){rate} for {self.lasts_s:.2f} s"


@dataclass(frozen=True)
class ChaosPlan:
    seed: int
    shape: ShapeName
    asks: tuple[Ask, ...]
    faults: tuple[ChaosFault, ...]

    def text(self) -> str:
        lines = [f"seed {self.seed}, {self.shape}", *(fault.text() for fault in self.faults), *(ask.text() for ask in self.asks)]
        return "\n".join(lines)


def draw_plan(seed: int, num_requests: int, shapes: Sequence[ShapeName]) -> ChaosPlan:
    """Everything follows from the arguments."""
    rng = random.Random(f"chaos {seed} {num_requests}")
    name = shapes[seed % len(shapes)]
    shape = SHAPES[name]
    asks = draw_traffic(rng, f"s{seed}", num_requests, WINDOW_S, shape.max_prompt, shape.max_new)
    faults = tuple(_fault(rng, shape, asks) for _ in range(rng.choice((2, 2, 3, 4))))
    return ChaosPlan(seed, name, asks, faults)


def _fault(rng: random.Random, shape: Shape, asks: Sequence[Ask]) -> ChaosFault:
    moment = _moment(rng, asks)
    if rng.random() < 0.6:
        # The coordinator takes every stream with it, so it dies seldom enough for the others to be seen.
        victim = rng.choices((*shape.workers, "coordinator", "link"), (*(1.0 for _ in shape.workers), 0.3, 0.5))[0]
        if victim == "link" or rng.random() < 0.7:
            return ChaosFault("kill", victim, moment, lasts_s=rng.uniform(0.0, 1.0))
        # Some hang for so long that they are given up, and come back when others have taken over.
        lasts_s = rng.uniform(11.0, 14.0) if rng.random() < 0.25 else rng.uniform(0.2, 3.0)
        return ChaosFault("pause", victim, moment, lasts_s)
    kind = rng.choice(LINK_KINDS)
    return ChaosFault(
        kind,
        "link",
        moment,
        lasts_s=rng.uniform(0.2, 2.0) if kind in ("stall", "black_hole", "slow") else 0.0,
        rate_mbit_s=rng.choice((0.2, 1.0)) if kind == "slow" else None,
        port=None if kind == "slow" else rng.choice((None, "kv", "kv", "control")),
        direction="both" if kind in ("cut", "reset", "slow") else rng.choice(("there", "back", "both")),
    )


def _moment(rng: random.Random, asks: Sequence[Ask]) -> Moment:
    """Mostly in the middle of an answer, for there is little to be seen between answers."""
    streamed = [ask for ask in asks if ask.max_tokens > 2 and ask.cancel is None and (ask.stream or ask.door == "grpc")]
    if not streamed or rng.random() < 0.35:
        return Moment(at_s=rng.uniform(0.0, WINDOW_S))
    ask = rng.choice(streamed)
    return Moment(request=ask.number, tokens=rng.randint(0, ask.max_tokens - 1))
