"""What a part found: rows, the JSON they are saved as, and the table that is shown. Imports no framework."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, Literal

Status = Literal["passed", "failed", "measured", "skipped"]


@dataclass(frozen=True)
class Finding:
    """``what`` was checked or measured. ``numbers``: by name, the unit at the end of the name; shares are of what the machine was measured
    to give. ``note``: why it failed or was skipped, or what is not as usual.
    """

    what: str
    status: Status
    note: str = ""
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PartResult:
    part: str
    seconds: float
    findings: tuple[Finding, ...]


def checked(what: str, problem: str | None, numbers: dict[str, float] | None = None, note: str = "") -> Finding:
    """Failed where there is a ``problem``."""
    return Finding(what, "passed" if problem is None else "failed", note if problem is None else problem, numbers or {})


def save_part(result: PartResult, path: Path) -> None:
    path.write_text(json.dumps(asdict(result)))


def load_part(path: Path) -> PartResult:
    raw = json.loads(path.read_text())
    return PartResult(raw["part"], raw["seconds"], tuple(Finding(**finding) for finding in raw["findings"]))


def count(results: Iterable[PartResult]) -> Counter[Status]:
    return Counter(finding.status for result in results for finding in result.findings)


def save_report(machine: dict[str, str], options: dict[str, str | int], results: Sequence[PartResult], path: Path) -> None:
    """The whole run as one JSON object. Numbers that are not finite become null, as JSON has no word for them."""
    report = {"machine": machine, "options": options, "counts": dict(count(results)), "parts": [asdict(result) for result in results]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(report), indent=1, allow_nan=False) + "\n")


_MARKS: Final[dict[Status, str]] = {"passed": "ok", "failed": "FAILED", "measured": "", "skipped": "skipped"}


def lines(result: PartResult) -> list[str]:
    """The table's rows of one part. Checks that passed are one row together; each by itself is in the JSON."""
    rows = [f"{result.part} ({result.seconds:.0f} s)"]
    passed = [finding for finding in result.findings if finding.status == "passed"]
    if passed:
        shares = [f.numbers["error"] / f.numbers["allowed"] for f in passed if f.numbers.keys() >= {"error", "allowed"}]
        worst = f", the largest error {max(shares):.0%} of what is allowed" if shares else ""
        rows.append(f"  {_MARKS['passed']:8}{len(passed)} checks{worst}")
    for finding in result.findings:
        if finding.status != "passed":
            tail = f"  {finding.note}" if finding.note else ""
            rows.append(f"  {_MARKS[finding.status]:8}{finding.what:52.52} {_numbers(finding.numbers)}{tail}")
    return rows


def _numbers(numbers: dict[str, float]) -> str:
    return "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in numbers.items())


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
