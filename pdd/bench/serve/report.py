"""A picture of a run: every request as a line of phases over time (prefill, KV on the link, relay, handoff, main), per target."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdd.bench.serve.client import Record
from pdd.bench.serve.command import Measured, Told

_COLOURS = {
    "prefill": "#c9a227",
    "KV on the link": "#9aa5b1",
    "relay": "#d1495b",
    "handoff": "#222222",
    "main": "#2e86ab",
    "waiting": "#e8e8e8",
    "answering": "#2e86ab",
}
_MOST_LINES = 200


@dataclass(frozen=True)
class Span:
    """Seconds since the run began. ``lane`` 0: what the user sees; 1: what happens behind it meanwhile."""

    phase: str
    start_s: float
    end_s: float
    lane: int = 0


def spans(record: Record) -> list[Span]:
    """The phases of one request: from PDD's timeline where there is one, else waiting and answering as the client saw them."""
    begin = record.start_s
    if not record.pieces:
        return [Span("waiting", begin, begin + record.e2e_s)]
    first, last = begin + record.ttft_s, begin + record.e2e_s

    def at(key: str) -> float | None:
        value = record.timeline.get(key)
        return begin + float(value) if isinstance(value, int | float) else None

    if not record.timeline:
        return [Span("waiting", begin, first), Span("answering", first, last)]
    prefilled, arrived = at("prefill_done_s"), at("main_kv_s")
    found = [Span("prefill", begin, min(first, prefilled) if prefilled is not None else first)]
    if prefilled is not None and arrived is not None and arrived > prefilled:
        found.append(Span("KV on the link", prefilled, arrived, lane=1))
    start, done = at("handoff_start_s"), at("handoff_done_s")
    if int(record.timeline.get("relay_tokens") or 0) == 0:
        return [*found, Span("main", first, last)]
    if start is None:
        return [*found, Span("relay", first, last)]
    taken = done if done is not None else last
    return [*found, Span("relay", first, max(first, start)), Span("handoff", max(first, start), taken), Span("main", taken, last)]


def save_report(measured: Sequence[Measured], told: Told, path: Path) -> None:
    """PNG for a ``.png`` path, for others one HTML file with the picture and the tables in it."""
    picture = _picture(measured)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".png":
        path.write_bytes(picture)
        return
    rows = "".join(
        f"<tr><th>{html.escape(key)}</th>" + "".join(f"<td>{html.escape(_shown(one.figures.get(key)))}</td>" for one in measured) + "</tr>"
        for key in measured[0].figures
    )
    heads = "".join(f"<th>{html.escape(one.label)}</th>" for one in measured)
    ours = sorted({key for one in measured for key in one.pdd or {}})
    rows += "".join(
        f"<tr><th>{html.escape(key)}</th>"
        + "".join(f"<td>{html.escape(_shown((one.pdd or {}).get(key)))}</td>" for one in measured)
        + "</tr>"
        for key in ours
    )
    title = f"{told.dataset} on {told.model}"
    path.write_text(
        f"<!doctype html><meta charset='utf-8'><title>{html.escape(title)}</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:2px 12px;text-align:right}th:first-child{text-align:left}</style>"
        f"<h1>{html.escape(title)}</h1><table><tr><th></th>{heads}</tr>{rows}</table>"
        f"<img alt='timelines' style='max-width:100%' src='data:image/png;base64,{base64.b64encode(picture).decode()}'>\n",
        encoding="utf-8",
    )


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _picture(measured: Sequence[Measured]) -> bytes:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    most = min(_MOST_LINES, max(len(one.run.records) for one in measured))
    size = (12, len(measured) * (1.2 + 0.12 * most))
    figure, axes = plt.subplots(len(measured), 1, figsize=size, layout="constrained", sharex=True, squeeze=False)
    used: dict[str, object] = {}
    for one, axis in zip(measured, axes[:, 0], strict=True):
        for line, record in enumerate(one.run.records[:_MOST_LINES]):
            for span in spans(record):
                low, height = (line - 0.1, 0.25) if span.lane else (line - 0.4, 0.3)
                used[span.phase] = axis.broken_barh(
                    [(span.start_s, max(0.0, span.end_s - span.start_s))], (low, height), color=_COLOURS[span.phase]
                )
            if record.error:
                axis.plot(record.start_s + record.e2e_s, line, "x", color="red", markersize=5)
        axis.set_title(f"{one.label}: {len(one.run.records)} requests, one per line", fontsize=9)
        axis.set_ylabel("request")
        axis.invert_yaxis()
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("seconds")
    figure.legend(used.values(), used.keys(), loc="outside upper center", ncols=len(used), fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=110, format="png", metadata={"Software": None})
    plt.close(figure)
    return buffer.getvalue()
