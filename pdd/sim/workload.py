"""Traffic for the simulator: who comes when, with which prompt. Lazy, so that memory stays flat; the same for equal seeds."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import simpy
from pydantic import Field, TypeAdapter, ValidationError

from pdd.bench.mix import SkewedMix, skewed
from pdd.sim.cache import Prompt
from pdd.sim.request import Outcome, Request
from pdd.sim.system import System
from pdd.strict_model import StrictModel
from pdd.user_yaml import mistakes, read_yaml

Steps = Generator[simpy.Event, object, None]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class LogNormal(StrictModel):
    """``median`` and the standard deviation of the logarithm."""

    median: Positive
    sigma: Annotated[float, Field(ge=0)] = 0.0


class StatedHits(StrictModel):
    """Requests that come one by one (Poisson), whose hit rates are drawn, not found: ``high_share`` of them hit ``high_hit``, the others
    what makes the mean ``mean_hit``, spread evenly up to ``low_spread`` around it. Both caches hold the same.
    """

    kind: Literal["stated_hits"]
    rate_per_s: Positive
    num_requests: Count
    prompt_tokens: Count
    output: LogNormal
    high_share: Share = 0.75
    high_hit: Share = 0.97
    mean_hit: Share = 0.9
    low_spread: Share = 0.2
    singular_share: Share = 0.0
    singular_output_tokens: Count = 16

    @property
    def low_hit(self) -> float:
        """Mean hit rate of the requests that do not hit high."""
        return (self.mean_hit - self.high_share * self.high_hit) / (1.0 - self.high_share) if self.high_share < 1 else self.high_hit


class Sessions(StrictModel):
    """Agents' sessions that begin as a Poisson process. A session's context grows by what a turn brings and by its answer; caches decide
    what is hit. ``shared_tokens``: of the first prompt, the same for all · ``wait_s``: of tool and user between an answer and the next
    turn · ``max_context_tokens``: a session ends there · ``max_turns``: at most.
    """

    kind: Literal["sessions"]
    rate_per_s: Positive
    num_requests: Count
    first: LogNormal
    shared_tokens: Annotated[int, Field(ge=0)] = 0
    added: LogNormal
    output: LogNormal
    wait_s: LogNormal
    max_turns: Count = 100
    max_context_tokens: Count


class Skewed(StrictModel):
    """The mix of `pdd bench ttft --mix skewed`, request by request: with the same seed and vocabulary the same arrivals and lengths. Both
    caches hold the primers when it begins. Parameters as :class:`pdd.bench.mix.SkewedMix` has them.
    """

    kind: Literal["skewed"] = "skewed"
    num_requests: Count = SkewedMix.num_requests
    rate_per_s: Positive = SkewedMix.rate_per_s
    num_sessions: Count = SkewedMix.num_sessions
    prefix_tokens: Count = SkewedMix.prefix_tokens
    high_share: Share = SkewedMix.high_share
    high_miss: Share = SkewedMix.high_miss
    low_hit: Share = SkewedMix.low_hit
    low_miss_tokens: tuple[Count, Count] = SkewedMix.low_miss_tokens
    singular_every: Count = SkewedMix.singular_every
    singular_tokens: Count = SkewedMix.singular_tokens
    singular_output_tokens: Count = SkewedMix.singular_output_tokens
    output_tokens: tuple[Count, Count] = SkewedMix.output_tokens
    vocab_size: Count = 49_152

    @property
    def mix(self) -> SkewedMix:
        return SkewedMix(**self.model_dump(exclude={"kind", "vocab_size"}))


Workload = StatedHits | Sessions | Skewed
_WORKLOAD: TypeAdapter[Workload] = TypeAdapter(Annotated[Workload, Field(discriminator="kind")])


def load_workload(path: Path) -> Workload:
    """From YAML. Raises ValueError, one line per mistake."""
    try:
        return _WORKLOAD.validate_python(read_yaml("workload", path))
    except ValidationError as error:
        raise ValueError("\n".join(f"workload {path}: {line}" for line in mistakes(error))) from error


def drive(system: System, workload: Workload, seed: int, ended: Callable[[Outcome], None]) -> simpy.Process:
    """A process that ends when all requests were submitted."""
    if isinstance(workload, Skewed):
        return system.env.process(_skewed(system, workload, seed, ended))
    if isinstance(workload, StatedHits):
        return system.env.process(_stated(system, workload, np.random.default_rng(seed), ended))
    return system.env.process(_sessions(system, workload, seed, ended))


def _stated(system: System, workload: StatedHits, rng: np.random.Generator, ended: Callable[[Outcome], None]) -> Steps:
    gaps, outputs = _exponential(rng, workload.rate_per_s), _lengths(rng, workload.output)
    low_from = max(0.0, workload.low_hit - workload.low_spread)
    low_to = min(1.0, 2 * workload.low_hit - low_from)
    for number in range(workload.num_requests):
        yield system.env.timeout(next(gaps))
        if rng.random() < workload.singular_share:
            hit, output = 0.0, workload.singular_output_tokens
        else:
            hit = workload.high_hit if rng.random() < workload.high_share else rng.uniform(low_from, low_to)
            output = next(outputs)
        tokens = int(hit * workload.prompt_tokens)
        prompt = Prompt(((number, workload.prompt_tokens),))
        system.submit(Request("t", prompt, output, 4 * output, hits=(tokens, tokens)), ended)


def _sessions(system: System, workload: Sessions, seed: int, ended: Callable[[Outcome], None]) -> Steps:
    """Sessions begin until together they have asked all requests."""
    left = [workload.num_requests]
    gaps = _exponential(np.random.default_rng(seed), workload.rate_per_s)
    number = 0
    while left[0] > 0:
        yield system.env.timeout(next(gaps))
        # Each draws from a stream of its own: what it asks does not depend on what others did meanwhile.
        system.env.process(_session(system, workload, np.random.default_rng([seed, number]), number, left, ended))
        number += 1


def _session(
    system: System, workload: Sessions, rng: np.random.Generator, number: int, left: list[int], ended: Callable[[Outcome], None]
) -> Steps:
    shared = (("shared", workload.shared_tokens),) if workload.shared_tokens else ()
    context = max(1, round(rng.lognormal(np.log(workload.first.median), workload.first.sigma)))
    for turn in range(workload.max_turns):
        if turn:
            context += max(1, round(rng.lognormal(np.log(workload.added.median), workload.added.sigma)))
        output = max(1, round(rng.lognormal(np.log(workload.output.median), workload.output.sigma)))
        if context + output > workload.max_context_tokens or left[0] <= 0:
            return
        left[0] -= 1
        prompt = Prompt((*shared, (number, context)))
        answered = Prompt((*shared, (number, context + output)))
        yield _answered(system, Request("t", prompt, output, 4 * output, answer=answered), ended)
        context += output
        yield system.env.timeout(float(rng.lognormal(np.log(workload.wait_s.median), workload.wait_s.sigma)))


def _answered(system: System, request: Request, ended: Callable[[Outcome], None]) -> simpy.Event:
    done = system.env.event()

    def told(outcome: Outcome) -> None:
        ended(outcome)
        done.succeed()

    system.submit(request, told)
    return done


def _skewed(system: System, workload: Skewed, seed: int, ended: Callable[[Outcome], None]) -> Steps:
    mix = skewed(workload.mix, workload.vocab_size, seed)
    keys = {primer: number for number, primer in enumerate(mix.primers)}
    for primer, key in keys.items():
        for worker in (*system.prefill.workers, *system.main.workers):
            worker.cache.put(((key, len(primer)),))
    for number, request in enumerate(mix.requests):
        yield system.env.timeout(request.arrival_s - system.env.now)
        hit = request.prompt_ids[: request.hit_tokens]
        known = next((key for primer, key in keys.items() if hit and primer[: len(hit)] == hit), None)
        parts = [] if known is None else [(known, len(hit))]
        prompt = Prompt((*parts, (("own", number), request.miss_tokens)))
        system.submit(Request("t", prompt, request.output_tokens, request.output_tokens), ended)


def _exponential(rng: np.random.Generator, rate_per_s: float) -> Iterator[float]:
    while True:
        yield from rng.exponential(1.0 / rate_per_s, size=1024).tolist()


def _lengths(rng: np.random.Generator, lengths: LogNormal) -> Iterator[int]:
    while True:
        for value in rng.lognormal(np.log(lengths.median), lengths.sigma, size=1024):
            yield max(1, round(float(value)))
