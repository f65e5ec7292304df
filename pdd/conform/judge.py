"""Whether streams of tokens may pass for the expected one: equal to it, or parted where the oracle is undecided too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdd.conform.oracle import Oracle, Verdict, verdict, verdicts
from pdd.conform.report import Parting
from pddbridge.sampling_params import SamplingParams


@dataclass(frozen=True)
class Stream:
    """A log whose first ``handoff`` tokens were given to whoever made the others."""

    handoff: int
    tokens: Sequence[int]


@dataclass(frozen=True)
class Judgement:
    """``margin``: the largest of any token (see :func:`pdd.conform.oracle.verdict`), at ``where`` · ``parting``: the first found ·
    ``num_equal``: streams or tokens that are the expected ones.
    """

    margin: float
    where: str
    parting: Parting | None
    num_equal: int


def judge_streams(
    streams: Sequence[Stream], expected: Sequence[int], oracle: Oracle, prompt: Sequence[int], params: SamplingParams
) -> Judgement:
    """A stream that parts from ``expected`` must be one that the oracle could have made: each token of its receiver is measured."""
    margin, where, num_equal = 0.0, "", 0
    parting: Parting | None = None
    for stream in streams:
        first = _first_difference(stream.tokens, expected[: len(stream.tokens)])
        if first is None:
            num_equal += 1
            continue
        found = verdicts(oracle, prompt, stream.tokens, params)
        parting = parting or _parting(first, stream.tokens[first], expected[first], found[first])
        position = _largest(found, stream.handoff)
        if found[position].margin >= margin:
            margin, where = found[position].margin, f"handoff at {stream.handoff}, position {position}"
    return Judgement(margin, where, parting, num_equal)


def judge_alone(tokens: Sequence[int], oracle: Oracle, prompt: Sequence[int], params: SamplingParams) -> Judgement:
    """Every token against the oracle's choice after the same tokens."""
    found = verdicts(oracle, prompt, tokens, params)
    position = _largest(found, 0)
    margin = found[position].margin
    first = next((at for at, seen in enumerate(found) if seen.choice != tokens[at]), None)
    parting = None if first is None else _parting(first, tokens[first], found[first].choice, found[first])
    equal = sum(seen.choice == token for seen, token in zip(found, tokens, strict=True))
    return Judgement(margin, "" if first is None else f"position {position}", parting, equal)


def judge_audit(chosen: Sequence[int], given: Sequence[int], oracle: Oracle, prompt: Sequence[int], params: SamplingParams) -> Judgement:
    """``chosen[i]``: what the receiver would have chosen after ``given[:i]``. Where that is not ``given[i]`` it is measured."""
    margin, where = 0.0, ""
    parting: Parting | None = None
    differing = [position for position, (a, b) in enumerate(zip(chosen, given, strict=True)) if a != b]
    logits = oracle.run([*prompt, *given][:-1]).logits[len(prompt) - 1 :] if differing else None
    for position in differing:
        assert logits is not None
        seen = verdict(logits[position], params, prompt, given[:position], chosen[position])
        parting = parting or _parting(position, chosen[position], given[position], seen)
        if seen.margin >= margin:
            margin, where = seen.margin, f"position {position}"
    return Judgement(margin, where, parting, len(given) - len(differing))


def _parting(position: int, given: int, expected: int, seen: Verdict) -> Parting:
    return Parting(position, given, expected, seen.top2_gap, seen.margin)


def _largest(found: Sequence[Verdict], start: int) -> int:
    """Position of the largest margin from ``start`` on."""
    margins = [seen.margin for seen in found]
    return margins.index(max(margins[start:]), start)


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    return next((position for position, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
