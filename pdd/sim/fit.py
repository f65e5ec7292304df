"""From what `pdd profile` measured of a deployment to the simulator's numbers for it. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

import numpy as np

from pdd.sim.costs import EngineCost


@dataclass(frozen=True)
class PrefillRun:
    """``seconds`` until ``tokens`` were computed behind ``cached`` ones."""

    tokens: int
    seconds: float
    cached: int = 0


@dataclass(frozen=True)
class DecodeRun:
    """``seconds`` per step of ``rows`` rows at ``role`` with ``context`` tokens each. ``busy``: roles whose engines ran."""

    role: str
    rows: int
    context: int
    seconds: float
    busy: tuple[str, ...]


@dataclass(frozen=True)
class BesideRun:
    """A short and a long prompt within one site while rows decoded at ``role``, of whom a step took ``step_s`` without prefill. Prefill
    had their KV after ``short_s`` and ``long_s``, the first tokens came ``firsts_s`` later.
    """

    role: str
    busy: tuple[str, ...]
    step_s: float
    short_tokens: int
    short_s: float
    long_tokens: int
    long_s: float
    firsts_s: tuple[float, ...]


@dataclass(frozen=True)
class LinkRun:
    """A direct request over the link. ``tokens`` computed after ``prefill_s``, the first token after ``first_s``; ``stored_bytes`` of KV
    went as ``coded_bytes``.
    """

    tokens: int
    prefill_s: float
    first_s: float
    stored_bytes: int
    coded_bytes: int


@dataclass(frozen=True)
class FarRun:
    """While ``rows`` rows of ``context`` tokens decoded at main and their tokens crossed the link: ``step_s`` of them, a prompt within one
    site, and one over the link.
    """

    rows: int
    context: int
    step_s: float
    prefill: PrefillRun
    link: LinkRun


@dataclass(frozen=True)
class ExtendRun:
    """``seconds`` from the seal of a relay to main's first token, ``tokens`` of log in between."""

    tokens: int
    seconds: float


@dataclass
class Measured:
    """``prefills``, ``main_firsts_s``: of requests alone within one site, the latter from the end of prefill to the first token ·
    ``hits``: of prompts that caches knew in part, ``hit_twins``: of as many new tokens right after each, unknown · ``pushes``,
    ``relay_firsts_s``: alone with a relay · ``links``: over the link · ``decodes``: of rows without prefill · ``prefills_beside``,
    ``decodes_beside``: of both at once · ``beside_link``: of rows while the link is busy · ``far``: of rows whose tokens cross it.
    """

    prefills: list[PrefillRun] = field(default_factory=list)
    main_firsts_s: list[float] = field(default_factory=list)
    hits: list[PrefillRun] = field(default_factory=list)
    hit_twins: list[PrefillRun] = field(default_factory=list)
    pushes: list[PrefillRun] = field(default_factory=list)
    relay_firsts_s: list[float] = field(default_factory=list)
    links: list[LinkRun] = field(default_factory=list)
    extends: list[ExtendRun] = field(default_factory=list)
    decodes: list[DecodeRun] = field(default_factory=list)
    prefills_beside: list[BesideRun] = field(default_factory=list)
    decodes_beside: list[DecodeRun] = field(default_factory=list)
    beside_link: list[DecodeRun] = field(default_factory=list)
    far: list[FarRun] = field(default_factory=list)


def fit_prefill(runs: Sequence[PrefillRun], step_tokens: int) -> tuple[float, float, float]:
    """Seconds per step, token and pair of tokens, with the least relative error and none below 0, to the median of each length. Raises
    ValueError for fewer than three lengths.
    """
    runs = _typical(runs)
    if len(runs) < 3:
        raise ValueError(f"fit_prefill: given runs of {len(runs)} lengths, at least 3 are needed")
    columns = [[math.ceil(run.tokens / step_tokens), run.tokens, run.tokens**2 / 2] for run in runs]
    base, token, pair = _least_squares(np.array(columns, np.float64), np.array([run.seconds for run in runs]))
    return base, token, pair


def fit_steps(runs: Sequence[PrefillRun], step_tokens: int) -> tuple[tuple[tuple[int, float], ...], float]:
    """((tokens of a step, seconds without attention), ...) by the medians of prompts of one step, and seconds per pair of tokens, not below
    0 and with the least relative error, by the longer ones, which are full steps: what those take beyond steps that have nothing before
    them. No sizes where those were not measured. Raises ValueError for no longer prompt.
    """
    typical = {run.tokens: run.seconds for run in _typical(runs)}
    sizes = sorted(tokens for tokens in typical if tokens <= step_tokens)
    longer = [tokens for tokens in typical if tokens > step_tokens and tokens % step_tokens == 0]
    if len(sizes) < 2 or sizes[-1] != step_tokens:
        return (), 0.0
    if not longer:
        raise ValueError(f"fit_steps: given runs of {sorted(typical)} tokens, one of several steps of {step_tokens} is needed")
    over, over_over = 0.0, 0.0
    for tokens in longer:
        num_steps = tokens // step_tokens
        pairs = step_tokens**2 * num_steps * (num_steps - 1) / 2 / typical[tokens]
        over += pairs * (typical[tokens] - num_steps * typical[step_tokens]) / typical[tokens]
        over_over += pairs**2
    pair_s = max(0.0, over / over_over)
    return tuple((tokens, max(0.0, typical[tokens] - pair_s * tokens**2 / 2)) for tokens in sizes), pair_s


def fit_jitter(measured: Measured) -> float:
    """Standard deviation of the logarithm of a step's time, by prompts alone: 1.48 times the median distance from the median of their
    length, which for a normal distribution is that; 0 where nothing was measured twice. A prompt of n steps varies by a root of n less.
    """
    distances = []
    for typical in _typical(measured.prefills):
        alike = [run.seconds for run in measured.prefills if (run.tokens, run.cached) == (typical.tokens, typical.cached)]
        if len(alike) > 1:
            distances += [abs(math.log(seconds / typical.seconds)) for seconds in alike]
    return 1.4826 * median(distances) if distances else 0.0


def fit_decode(runs: Sequence[DecodeRun]) -> tuple[float, float, float]:
    """Seconds per step, row and token of context, likewise."""
    if len(runs) < 3:
        raise ValueError(f"fit_decode: given {len(runs)} runs, at least 3 are needed")
    columns = [[1.0, run.rows, run.rows * run.context] for run in runs]
    step, row, context = _least_squares(np.array(columns), np.array([run.seconds for run in runs]))
    return step, row, context


def fit_extend(runs: Sequence[ExtendRun]) -> float:
    """Seconds per log token: the slope between the shortest and the longest, by their medians; not below 0."""
    low, high = min(run.tokens for run in runs), max(run.tokens for run in runs)
    if low == high:
        raise ValueError(f"fit_extend: all runs are of {low} tokens, two lengths are needed")
    few, many = (median(run.seconds for run in runs if run.tokens == tokens) for tokens in (low, high))
    return max(0.0, (many - few) / (high - low))


def fit_slowdown(measured: Measured, costs: dict[str, EngineCost], step_tokens: int) -> dict[tuple[str, ...], dict[str, float]]:
    """By roles that were busy at once: how many times longer each of them took than alone; the median of what was measured."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for beside in measured.prefills_beside:
        found.setdefault(beside.busy, {}).setdefault("prefill", []).append(prefill_times(beside, costs["prefill"], step_tokens))
    for run in (*measured.decodes_beside, *(run for run in measured.decodes if len(run.busy) > 1)):
        times = run.seconds / costs[run.role].step(run.rows, run.rows * run.context)
        found.setdefault(run.busy, {}).setdefault(run.role, []).append(times)
    return {busy: {role: max(1.0, median(times)) for role, times in roles.items()} for busy, roles in sorted(found.items())}


def fit_waits(measured: Measured, costs: dict[str, EngineCost], step_tokens: int, overheads_s: dict[str, float]) -> tuple[float, float]:
    """In steps of a decode worker that is busy: until it has answered what it holds of a prompt, and from the arrival of KV to the first
    token. It takes commands between steps.
    """
    reserve, arrive = [], []
    for run in measured.prefills_beside:
        short_s = costs["prefill"].prefill(run.short_tokens, 0, step_tokens) * prefill_times(run, costs["prefill"], step_tokens)
        reserve.append((run.short_s - short_s) / run.step_s)
        arrive += [(first_s - overheads_s[run.role]) / run.step_s for first_s in run.firsts_s]
    return max(0.0, median(reserve)), max(1.0, median(arrive))


def prefill_times(run: BesideRun, cost: EngineCost, step_tokens: int) -> float:
    """How many times longer than alone prefill took for what the long prompt had more than the short one: what both waited for is out."""
    alone_s = cost.prefill(run.long_tokens, 0, step_tokens) - cost.prefill(run.short_tokens, 0, step_tokens)
    return (run.long_s - run.short_s) / alone_s


def fit_hit(measured: Measured, cost: EngineCost) -> float:
    """Seconds of prefill that a prompt takes for having something cached, beside its steps: more than its twin, attention aside. Twins run
    one after the other, so that a machine that drifts is not taken for it.
    """
    pairs = zip(measured.hits, measured.hit_twins, strict=True)
    return max(0.0, median(hit.seconds - twin.seconds - cost.prefill_pair_s * hit.tokens * hit.cached for hit, twin in pairs))


def fit_beside(measured: Measured, costs: dict[str, EngineCost], step_tokens: int, rtt_s: float) -> dict[str, dict[str, float]]:
    """How many times longer roles took while the link was busy, and while prefill's KV went to a relay, too."""
    cost = costs["prefill"]

    def later_steps(run: PrefillRun | LinkRun, seconds: float) -> float | None:
        first_s = cost.prefill(min(step_tokens, run.tokens), 0, step_tokens)  # nothing has left before it has ended
        alone_s = cost.prefill(run.tokens, 0, step_tokens) - first_s
        return (seconds - first_s) / alone_s if alone_s > 0 else None

    links = [times for run in measured.links if (times := later_steps(run, run.prefill_s - rtt_s)) is not None]
    main = [run.seconds / costs["main"].step(run.rows, run.rows * run.context) for run in measured.beside_link]
    found = {"link": {"prefill": max(1.0, median(links)), "main": max(1.0, median(main))}}
    if measured.pushes:  # what the longest had more than the shortest: what both waited for is out
        short, *_, long = sorted(_typical(measured.pushes), key=lambda run: run.tokens)
        alone_s = cost.prefill(long.tokens, 0, step_tokens) - cost.prefill(short.tokens, 0, step_tokens)
        found["push"] = {"prefill": max(1.0, (long.seconds - short.seconds) / alone_s)}
    return found


def fit_far(
    measured: Measured, costs: dict[str, EngineCost], step_tokens: int, beside_main: float, reserve_steps: float
) -> dict[str, float]:
    """How many times longer roles take where main's tokens cross the link. ``beside_main``: what main's rows alone do to prefill, beside
    which the rest adds up (:meth:`pdd.sim.server.Host.speed`).
    """
    main = [run.step_s / costs["main"].step(run.rows, run.rows * run.context) for run in measured.far]
    prefill = [
        (run.prefill.seconds - reserve_steps * run.step_s) / costs["prefill"].prefill(run.prefill.tokens, 0, step_tokens) - beside_main + 1
        for run in measured.far
    ]
    return {"prefill": max(1.0, median(prefill)), "main": max(1.0, median(main))}


def fit_busy_link(measured: Measured, main_s: float, arrive_steps: float, rtt_s: float, rate_bytes_s: float) -> float:
    """Seconds of a transfer to a main that decodes, beside its bytes, round trips and steps."""
    over = [
        run.link.first_s - run.link.prefill_s - run.link.coded_bytes / rate_bytes_s - rtt_s - main_s - arrive_steps * run.step_s
        for run in measured.far
    ]
    return max(0.0, median(over))


def fit_link_overhead(
    measured: Measured, main: EngineCost, main_s: float, rtt_s: float, rate_bytes_s: float, step_tokens: int
) -> tuple[float, float]:
    """(coded over stored bytes, seconds of a transfer beside its bytes and round trips), by requests whose prompt takes one step."""
    share = sum(run.coded_bytes for run in measured.links) / sum(run.stored_bytes for run in measured.links)
    short = [run for run in measured.links if run.tokens <= step_tokens]
    over = [run.first_s - run.prefill_s - run.coded_bytes / rate_bytes_s - rtt_s - main.step(1, run.tokens) - main_s for run in short]
    return share, max(0.0, median(over))


def first_overhead(firsts_s: Sequence[float], step: Callable[[int, float], float]) -> float:
    """Of a first token beside its step; not below 0."""
    return max(0.0, median(firsts_s) - step(1, 0.0))


def _typical(runs: Sequence[PrefillRun]) -> list[PrefillRun]:
    """The median of each kind: what else a machine does is in the requests that are predicted, too."""
    kinds: dict[tuple[int, int], list[float]] = {}
    for run in runs:
        kinds.setdefault((run.tokens, run.cached), []).append(run.seconds)
    return [PrefillRun(tokens, median(seconds), cached) for (tokens, cached), seconds in kinds.items()]


def _least_squares(columns: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Coefficients that are not negative, by trying every subset of the columns: there are three."""
    scaled, ones = columns / seconds[:, None], np.ones(len(seconds))
    best: tuple[float, list[float]] | None = None
    for size in range(1, columns.shape[1] + 1):
        for subset in combinations(range(columns.shape[1]), size):
            found, *_ = np.linalg.lstsq(scaled[:, subset], ones, rcond=None)
            if np.any(found < 0):
                continue
            error = float(np.sum((scaled[:, subset] @ found - ones) ** 2))
            if best is None or error < best[0] - 1e-12:
                values = [0.0] * columns.shape[1]
                for index, value in zip(subset, found, strict=True):
                    values[index] = float(value)
                best = error, values
    assert best is not None, "one column alone always fits with a positive factor"
    return best[1]
