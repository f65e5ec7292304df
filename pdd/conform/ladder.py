"""The ladder: opens both engines per dtype, runs the levels that were asked for, and goes on after one has failed."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec

from pdd.conform.l0_bytes import check_bytes
from pdd.conform.l1_op import check_op
from pdd.conform.l2_logits import check_engine
from pdd.conform.l3_stream import Alone, check_alone, check_handoffs, run_alone
from pdd.conform.l4_system import check_system
from pdd.conform.oracle import Oracle
from pdd.conform.plan import TOLERANCES, Plan
from pdd.conform.prompts import prompt_ids
from pdd.conform.report import Check, Level, Report
from pdd.conform.side import Dtype, Side, open_engine
from pddbridge.engine import Engine
from pddbridge.fingerprint import fingerprint

P = ParamSpec("P")
Tell = Callable[[str], None]
OpenSide = Callable[[Side, Dtype], Engine]

_log = logging.getLogger(__name__)
_DIRECTIONS = ((0, 1), (1, 0))


def run(sides: tuple[Side, Side], plan: Plan, cache_dir: Path, tell: Tell, open_side: OpenSide | None = None) -> Report:
    """Run ``plan`` on ``sides`` a and b; a's model is the oracle's.

    ``tell``: what happens now, one line · ``open_side``: in place of :func:`pdd.conform.side.open_engine`. Raises ValueError when an
    engine or the model's text side cannot be opened at all.
    """
    started_s = time.monotonic()
    ladder = _Ladder(sides, plan, cache_dir, tell)
    for dtype in plan.dtypes:
        if set(plan.levels) - {"L4"}:
            tell(f"{dtype}: opening {sides[0].label} and {sides[1].label}")
            if open_side is None:
                a, b = (open_engine(side, dtype, plan.sizes, plan.threads, cache_dir / "compiled") for side in sides)
            else:
                a, b = (open_side(side, dtype) for side in sides)
            ladder.compare(dtype, (a, b))
            del a, b
            gc.collect()  # the next dtype's engines, or L4's workers, need the device's memory
        if "L4" in plan.levels:
            ladder.system(dtype)
    return Report(
        a=sides[0].label,
        b=sides[1].label,
        model_a=str(sides[0].model_dir),
        model_b=str(sides[1].model_dir),
        seed=plan.seed,
        checks=tuple(ladder.checks),
        fallbacks=ladder.fallbacks,
        seconds=time.monotonic() - started_s,
    )


def check_fingerprints(dtype: Dtype, engines: tuple[Engine, Engine]) -> tuple[Check, ...]:
    """Whether the two would accept KV from one another at all."""
    a, b = (fingerprint(engine.spec, engine.weights_digest, engine.kv_spec) for engine in engines)
    differing = [
        name
        for name, x, y in (
            ("architecture", engines[0].spec, engines[1].spec),
            ("weights", engines[0].weights_digest, engines[1].weights_digest),
            ("KV", engines[0].kv_spec, engines[1].kv_spec),
        )
        if x != y
    ]
    note = f"both {a[:16]}" if a == b else f"a {a[:16]}, b {b[:16]}: {' and '.join(differing)} differ; workers would refuse each other's KV"
    return (Check("handshake", dtype, "a<->b", "fingerprint", a == b, note=note),)


class _Ladder:
    """Gathers what the levels find."""

    def __init__(self, sides: tuple[Side, Side], plan: Plan, cache_dir: Path, tell: Tell) -> None:
        self._sides, self._plan, self._cache_dir, self._tell = sides, plan, cache_dir, tell
        self._oracle = Oracle(sides[0].model_dir)
        self._prompt = prompt_ids(sides[0].model_dir, plan.prompt, plan.prompt_tokens, plan.seed)
        self.checks: list[Check] = []
        self.fallbacks: dict[str, dict[str, int]] = {}

    def compare(self, dtype: Dtype, engines: tuple[Engine, Engine]) -> None:
        """The handshake and L0 to L3."""
        plan, prompt, tolerance = self._plan, self._prompt, TOLERANCES[dtype]
        self._try("handshake", dtype, "a<->b", check_fingerprints, dtype, engines)
        if "L0" in plan.levels:
            for x, y in _DIRECTIONS:
                self._try("L0", dtype, self._way(x, y), check_bytes, engines[x], engines[y], self._way(x, y), len(prompt) - 1, plan.seed)
        for side, engine in zip(self._sides, engines, strict=True):
            if "L1" in plan.levels:
                self._try("L1", dtype, side.name, check_op, side, engine.spec, dtype, plan.seed)
        for side, engine in zip(self._sides, engines, strict=True):
            if "L2" in plan.levels:
                self._try("L2", dtype, side.name, check_engine, engine, self._oracle, side.name, prompt, tolerance, plan.seed)
        if "L3" in plan.levels:
            self._streams(dtype, engines)
        for side, engine in zip(self._sides, engines, strict=True):
            self.fallbacks[f"{side.name} {dtype}"] = dict(engine.stats().fallbacks)

    def system(self, dtype: Dtype) -> None:
        """L4, one deployment per direction."""
        for x, y in _DIRECTIONS:
            arguments = (self._sides[x], self._sides[y], self._way(x, y), dtype, self._prompt, self._plan, self._cache_dir, self._oracle)
            self._try("L4", dtype, self._way(x, y), check_system, *arguments)

    def _streams(self, dtype: Dtype, engines: tuple[Engine, Engine]) -> None:
        plan, prompt, tolerance = self._plan, self._prompt, TOLERANCES[dtype]
        for x, y in _DIRECTIONS:
            alone: list[Alone] = []

            def stream(engine: Engine = engines[x], name: str = self._sides[x].name, into: list[Alone] = alone) -> tuple[Check, ...]:
                into.append(run_alone(engine, prompt, plan))
                return check_alone(into[0], self._oracle, name, prompt, plan, tolerance)

            self._try("L3", dtype, self._sides[x].name, stream)
            if alone:
                arguments = (alone[0], engines[y], self._oracle, self._way(x, y), prompt, plan, tolerance)
                self._try("L3", dtype, self._way(x, y), check_handoffs, *arguments)

    def _try(self, level: Level, dtype: Dtype, way: str, check: Callable[P, tuple[Check, ...]], *args: P.args, **kwargs: P.kwargs) -> None:
        """A level that raises has failed; the others still say what they find."""
        self._tell(f"{dtype}: {level} {way}")
        try:
            self.checks += check(*args, **kwargs)
        except Exception as error:  # noqa: BLE001
            # Whatever a framework, a compiler or a driver raises where it cannot do what the level asks.
            _log.exception("%s %s %s", level, dtype, way)
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.checks.append(Check(level, dtype, way, "could not be carried out", False, note=why))

    def _way(self, source: int, target: int) -> str:
        return f"{self._sides[source].name}->{self._sides[target].name}"
