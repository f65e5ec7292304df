"""What goes wrong on an emulated link: a script of faults, written down in the launch config or drawn from a seed. Owns its validation.

:mod:`pdd.launch.link_connection` carries it out.
"""

from __future__ import annotations

import random
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FaultKind = Literal["stall", "cut", "half_close", "reset", "flip", "black_hole"]
Way = Literal["there", "back"]
PortKind = Literal["control", "kv"]
ALL_KINDS: tuple[FaultKind, ...] = ("stall", "cut", "half_close", "reset", "flip", "black_hole")
_LASTING: tuple[FaultKind, ...] = ("stall", "black_hole")
_TRIGGERS = ("after_bytes", "after_s", "after_idle_s", "at_s")


class Fault(BaseModel):
    """One thing that goes wrong on a connection. ``there`` is from the site that connects to the one that listens.

    Kinds: *stall*: bytes wait, nothing is lost or closed · *cut*: both ends see an orderly end of the stream, after what is under way ·
    *half_close*: the far side of ``direction`` sees the end of the stream, later bytes are swallowed, the other direction goes on ·
    *reset*: both ends are reset, what is under way is lost · *flip*: the lowest bit of the next byte is inverted · *black_hole*: bytes and
    closes are swallowed silently; with ``duration_s`` the connection is reset after it, for its stream has a hole.

    Exactly one trigger: ``after_bytes`` read on the connection in direction ``counting`` · ``after_s`` from its accept ·
    ``after_idle_s`` without a byte in either direction (with black_hole: a middlebox that forgets idle flows) · ``at_s`` from the start of
    the emulator: every connection of that moment, and those accepted while the fault lasts.

    ``connections``: numbers of the connections it happens to, in the order of accepting on their port; None for all. ``port``: only on
    ports that carry this, None for both. ``direction`` has no meaning for cut and reset, they end both.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: FaultKind
    direction: Way | Literal["both"] = "both"
    after_bytes: Annotated[int, Field(ge=0)] | None = None
    after_s: Annotated[float, Field(ge=0)] | None = None
    after_idle_s: Annotated[float, Field(gt=0)] | None = None
    at_s: Annotated[float, Field(ge=0)] | None = None
    counting: Way = "there"
    duration_s: Annotated[float, Field(gt=0)] | None = None
    connections: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    port: PortKind | None = None

    @model_validator(mode="after")
    def _is_one_thing(self) -> Fault:
        given = [name for name in _TRIGGERS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a fault has exactly one of {', '.join(_TRIGGERS)}, given {', '.join(given) or 'none'}")
        if self.duration_s is not None and self.kind not in _LASTING:
            raise ValueError(f"duration_s: only {' and '.join(_LASTING)} last, given {self.kind!r}")
        if self.at_s is not None and self.connections is not None:
            raise ValueError("connections: a fault with at_s happens to all connections of its moment")
        return self

    @property
    def ways(self) -> tuple[Way, ...]:
        """The directions it happens to."""
        return ("there", "back") if self.direction == "both" else (self.direction,)

    def concerns(self, port: PortKind, connection: int) -> bool:
        """Whether connection number ``connection`` of a port that carries ``port`` is among those it happens to."""
        return self.port in (None, port) and (self.connections is None or connection in self.connections)


class LinkOrder(BaseModel):
    """What a running emulator is told: let ``fault`` happen now on every link, whatever its trigger says (``at_s: 0`` means nothing else);
    without one, carry ``rate_mbit_s`` per direction from now on, None for what the config says.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    fault: Fault | None = None
    rate_mbit_s: Annotated[float, Field(ge=0.001, le=1e6)] | None = None


class RandomFaults(BaseModel):
    """One fault for each of the first ``num_connections`` connections of every port, drawn from ``seed``: kind, direction and place within
    the first ``within_bytes``. Lasting ones last up to ``longest_s``, so that whoever waits gets through in the end.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int
    num_connections: Annotated[int, Field(ge=1)] = 8
    within_bytes: Annotated[int, Field(ge=1)] = 1 << 20
    longest_s: Annotated[float, Field(gt=0)] = 1.0
    kinds: Annotated[tuple[FaultKind, ...], Field(min_length=1)] = ALL_KINDS
    port: PortKind | None = None

    def draw(self) -> tuple[Fault, ...]:
        """The script, the same for equal fields."""
        rng = random.Random(self.seed)
        return tuple(self._one(rng, connection) for connection in range(self.num_connections))

    def _one(self, rng: random.Random, connection: int) -> Fault:
        kind = rng.choice(self.kinds)
        lasts_s = rng.uniform(0.001, 1.0) * self.longest_s
        return Fault(
            kind=kind,
            direction=rng.choice(("there", "back", "both")),
            # Replies are a small part of what is sent; counting them as often would let most faults never happen.
            counting="back" if rng.random() < 0.2 else "there",
            after_bytes=int(self.within_bytes * rng.random()),
            duration_s=lasts_s if kind in _LASTING else None,
            connections=(connection,),
            port=self.port,
        )
