"""What the levels found: checks with the largest error and its place, streams that parted, audits. Owns their JSON form and the table."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from rich import box
from rich.console import Console
from rich.table import Table

Level = Literal["handshake", "L0", "L1", "L2", "L3", "L4"]
LEVELS: tuple[str, ...] = tuple(level for level in get_args(Level) if level != "handshake")


@dataclass(frozen=True)
class Parting:
    """The first token of a stream that another stream has differently, at log ``position``.

    ``top2_gap``: how far the oracle's best logit stands above its second there, after penalties · ``margin``: how far logits would have to
    move for the oracle to choose ``given`` (0 where it does).
    """

    position: int
    given: int
    expected: int
    top2_gap: float
    margin: float


@dataclass(frozen=True)
class Audit:
    """Of ``tokens`` log tokens that one side gave and the other recomputed, the other would have chosen ``disagreements`` differently."""

    tokens: int
    disagreements: int

    @property
    def rate(self) -> float:
        return self.disagreements / self.tokens


@dataclass(frozen=True)
class Check:
    """One line of the table. ``way``: "a", "b", "a->b" or "b->a" · ``error``, ``tolerance``: in the check's own measure, None where there
    is nothing to measure · ``where``: the place of the largest error · ``note``: what else to know; for a failure without a number, why.
    """

    level: Level
    dtype: str
    way: str
    what: str
    passed: bool
    error: float | None = None
    tolerance: float | None = None
    where: str = ""
    note: str = ""
    parting: Parting | None = None
    audit: Audit | None = None


@dataclass(frozen=True)
class Report:
    """``fallbacks``: per side and dtype, what the engine counted as not its usual path."""

    a: str
    b: str
    model_a: str
    model_b: str
    seed: int
    checks: tuple[Check, ...]
    fallbacks: dict[str, dict[str, int]]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def audits(self) -> dict[str, Audit]:
        """By dtype, over both directions and all samplers."""
        found: dict[str, Audit] = {}
        for check in self.checks:
            if check.audit is not None:
                before = found.get(check.dtype, Audit(0, 0))
                found[check.dtype] = Audit(before.tokens + check.audit.tokens, before.disagreements + check.audit.disagreements)
        return found

    @property
    def failed_levels(self) -> tuple[str, ...]:
        """In the ladder's order."""
        failed = {check.level for check in self.checks if not check.passed}
        return tuple(level for level in get_args(Level) if level in failed)


def within(error: float, tolerance: float) -> bool:
    """Whether ``error`` is within ``tolerance``; NaN never is."""
    return not math.isnan(error) and error <= tolerance


def save(report: Report, file: Path) -> None:
    """JSON: the fields, ``passed``, ``failed_levels`` and ``audit_rates`` by dtype. Numbers that JSON has no word for become null."""
    fields = asdict(report) | {
        "passed": report.passed,
        "failed_levels": list(report.failed_levels),
        "audit_rates": {dtype: audit.rate for dtype, audit in report.audits.items()},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(_finite(fields), indent=1) + "\n", encoding="utf-8")


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def show(report: Report, console: Console) -> None:
    """The table of checks, where streams parted, audit rates, fallbacks, and one last line that names the levels that failed."""
    table = Table(title=f"a = {report.a}, b = {report.b}, {report.model_a}", title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in ("level", "dtype", "way", "what"):
        table.add_column(column, no_wrap=True)
    for column in ("largest error", "allowed"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("where")
    for check in report.checks:
        result = "[green]ok[/green]" if check.passed else "[bold red]FAIL[/bold red]"
        where = "; ".join(part for part in (check.where, check.note) if part)
        table.add_row(check.level, check.dtype, check.way, check.what, _number(check.error), _number(check.tolerance), result, where)
    console.print(table)
    for check in report.checks:
        if check.parting is not None:
            console.print(f"{check.level} {check.dtype} {check.way} {check.what}: {_said(check.parting)}", soft_wrap=True)
    for dtype, audit in report.audits.items():
        parts = ", ".join(
            f"{check.way} {check.what.removesuffix(' audit')} {check.audit.disagreements}/{check.audit.tokens}"
            for check in report.checks
            if check.audit is not None and check.dtype == dtype
        )
        console.print(
            f"audit {dtype}: receivers would have chosen {audit.disagreements} of {audit.tokens} given tokens differently"
            f" ({100 * audit.rate:.1f} %): {parts}",
            soft_wrap=True,
        )
    for side, counted in report.fallbacks.items():
        if any(counted.values()):
            console.print(f"fallbacks {side}: {', '.join(f'{name} {count}' for name, count in counted.items() if count)}", soft_wrap=True)
    if report.passed:
        console.print(f"[green]pass[/green]: every level that was asked for, {report.seconds:.0f} s")
    else:
        console.print(f"[bold red]FAIL[/bold red]: {', '.join(report.failed_levels)}, {report.seconds:.0f} s")


def _said(parting: Parting) -> str:
    return (
        f"first differing token at position {parting.position}: {parting.given}, expected {parting.expected};"
        f" oracle's top-2 gap {parting.top2_gap:.3g}, {parting.given} is {parting.margin:.3g} from its choice"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
