"""What ``pdd compile`` shows: a row per thing compiled, and the messages of those that failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from pdd.compile.children import Row

_WIDTH: Final = 180  # of a table that is read later


def progress(row: Row) -> str:
    """One line, as soon as a row comes."""
    return f"{'ok  ' if row['ok'] else 'FAIL'} {row['seconds']:>7} s  {row['target']}  {row['what']}"


def show(rows: Sequence[Row], console: Console) -> None:
    """Memory is per device, in the compiler's account. FLOPs and bytes are those of the whole operation or step on one device, counted from
    its shapes. ``at least``: what they take at the chip's peaks, whichever is longer, and the other's share of that time.
    """
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    table = Table(title="compiled without the chip", title_justify="left")
    for name, justify in (
        ("target", "left"),
        ("what", "left"),
        ("s", "right"),
        ("arguments + temporaries + output − alias, or registers", "left"),
        ("GFLOP", "right"),
        ("MB", "right"),
        ("at least", "right"),
        ("bound by", "left"),
    ):
        table.add_column(name, justify="right" if justify == "right" else "left")
    for row in rows:
        bound = _part(row, "roofline")
        table.add_row(
            f"{row['target']} × {row['num_devices']}",
            f"{'' if row['ok'] else 'FAILED '}{row['what']}",
            f"{row['seconds']}",
            _memory(row),
            _scaled(row.get("flops"), 1e9),
            _scaled(row.get("bytes"), 1e6),
            f"{_number(bound['bound_s']) * 1e3:.3f} ms" if bound else "",
            _shares(bound) if bound else "",
            style=None if row["ok"] else "red",
        )
    console.print(table)
    failed = [row for row in rows if not row["ok"]]
    for row in failed:
        console.print(f"{row['target']}: {row['what']}\n{row['error']}\n", style="red", markup=False, soft_wrap=True)
    console.print(f"{len(rows) - len(failed)} of {len(rows)} compiled and fit")


def _memory(row: Row) -> str:
    if memory := _part(row, "memory"):
        names = ("arguments_bytes", "temporaries_bytes", "output_bytes", "alias_bytes", "peak_bytes")
        arguments, temporaries, output, alias, peak = (_size(_number(memory[name])) for name in names)
        return f"{arguments} + {temporaries} + {output} − {alias} = {peak}"
    if registers := _part(row, "registers"):
        shared = _number(registers["shared_bytes"]) / 1024
        return f"{registers['registers']} registers, {registers['spill_bytes']} B spilled, {shared:.0f} KiB shared"
    return ""


def _shares(bound: Row) -> str:
    by = str(bound["bound_by"])
    other = "bytes" if by == "flops" else "flops"
    names = {"flops": "FLOPs", "bytes": "bytes"}
    return f"{names[by]} ({names[other]} {_number(bound[f'{other}_share']):.0%})"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _scaled(value: object, unit: float) -> str:
    return f"{_number(value) / unit:,.1f}" if value else ""


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _part(row: Row, name: str) -> Row | None:
    part = row.get(name)
    assert part is None or isinstance(part, dict)
    return part
