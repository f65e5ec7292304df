"""The step after the one under way, before that one's tokens are known: when there is one, and what it is.

While the device computes step n, the host plans step n + 1 and tells the device, which feeds it with the tokens of step n by itself. So the
device waits for nobody between two steps. It works where nothing can come between: every row samples, the device chooses every token, and
nobody else waits for a row or for pages. A request that turns out to have ended with step n has a row too many in step n + 1, which is
dropped: what it wrote lies past the request's KV, where anything may lie. So is a row that the device fed with a drawn token which the host
does not confirm (:mod:`pddbridge.draw_plan`); the request's next row computes the right one in the same place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pdd.worker.batch import BatchRow, build_step
from pdd.worker.metrics import Counters
from pdd.worker.request import Phase, RequestState
from pddbridge.choice import why_on_host
from pddbridge.engine import Engine, SampleRow, Step, StepResult, StepUnderWay, start_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Flight:
    """A step that was started, and the row of each of its requests. ``ahead``: it was, before the tokens of the step before were known ·
    ``misfed``: rows that the device computes of another token than was chosen (:attr:`pddbridge.engine.StepResult.misfed`).
    """

    rows: tuple[BatchRow, ...]
    step: Step
    under_way: StepUnderWay
    ahead: bool = False
    misfed: tuple[int, ...] = ()

    def counts(self, number: int) -> bool:
        """Whether row ``number`` is still what its request needs: false for one that ended, or failed, since the step was planned, or that
        computes another token."""
        request, row = self.rows[number].request, self.rows[number]
        wanted = (request.decode or not row.samples) and number not in self.misfed
        return request.phase is Phase.ACTIVE and wanted and request.kv_len == int(self.step.context_lens[number])

    def leaves_out(self, requests: Iterable[RequestState]) -> bool:
        """Whether any of ``requests`` has tokens to compute and no row."""
        in_step = {row.request.request_id for row in self.rows}
        return any(r.phase is Phase.ACTIVE and r.num_pending and r.request_id not in in_step for r in requests)


class Flights:
    """Starts steps and waits for them. ``grow(request, num_tokens)`` gives a request the pages for so many tokens, if that is possible at
    nobody's cost · ``failed(rows, error)`` is told of a step that raised.
    """

    def __init__(
        self,
        engine: Engine,
        grow: Callable[[RequestState, int], bool],
        failed: Callable[[Sequence[BatchRow], Exception], None],
        counters: Counters,
    ) -> None:
        self._engine = engine
        self._grow = grow
        self._failed = failed
        self._counters = counters

    def start(self, rows: Sequence[BatchRow]) -> Flight | None:
        """None: it failed."""
        return self._start(tuple(rows), build_step(rows, self._engine.config.page_size), None)

    def start_behind(self, flight: Flight) -> Flight | None:
        """The step that follows ``flight``, which nobody has waited for; None where there is none, or it failed."""
        config = self._engine.config
        step = step_behind(flight, config.page_size, self._grow, config.sample_on_device)
        if step is None:
            return None
        self._counters.steps_ahead += 1
        return self._start(tuple(BatchRow(row.request, 1, samples=True) for row in flight.rows), step, flight.under_way)

    def result(self, flight: Flight) -> StepResult | None:
        """Wait for it; None: it failed."""
        try:
            return flight.under_way.result()
        except Exception as error:
            logger.exception("a step failed under way")
            self._failed(flight.rows, error)
            return None

    def _start(self, rows: tuple[BatchRow, ...], step: Step, after: StepUnderWay | None) -> Flight | None:
        self._counters.steps += 1
        try:
            return Flight(rows, step, start_step(self._engine, step, after), after is not None)
        except Exception as error:
            logger.exception("step %d failed", self._counters.steps)
            self._failed(rows, error)
            return None


def step_behind(flight: Flight, page_size: int, grow: Callable[[RequestState, int], bool], draws: bool) -> Step | None:
    """The decode step that follows ``flight``, every row one token further; None where it cannot be known. ``grow``: as above · ``draws``:
    whether the device draws.
    """
    goes_on = all(flight.counts(number) and _goes_on(row, draws) for number, row in enumerate(flight.rows))
    if not (goes_on and flight.under_way.feeds_next):
        return None
    lens = flight.step.context_lens + np.diff(flight.step.row_starts)
    if not all(grow(row.request, int(length) + 1) for row, length in zip(flight.rows, lens, strict=True)):
        return None
    num_pages = -(-(lens + 1) // page_size)
    page_tables = np.zeros((len(lens), int(num_pages.max())), np.int32)
    for row, used, table in zip(flight.rows, num_pages.tolist(), page_tables, strict=True):
        table[:used] = row.request.pages[:used]
    samples = tuple(_next_sample(number, row.request) for number, row in enumerate(flight.rows))
    unknown, starts = np.zeros(len(lens), np.int32), np.arange(len(lens) + 1, dtype=np.int32)
    return Step(unknown, starts, lens, page_tables, samples)


def _goes_on(row: BatchRow, draws: bool) -> bool:
    """Whether the request of ``row`` takes another token after the one that the row samples, unless that one ends it."""
    request = row.request
    if not row.samples or row.scores:
        return False
    log_len = request.log_len + 1
    full = len(request.tokens) + 1 >= request.max_context_tokens or log_len >= request.params.max_tokens
    limited = request.propose_limit is not None and log_len >= request.propose_limit
    return not full and not limited and why_on_host(request.params, log_len, draws) is None


def _next_sample(number: int, request: RequestState) -> SampleRow:
    prompt = request.tokens.view(0, request.prompt_len)
    log = request.tokens.view(request.prompt_len, len(request.tokens))
    return SampleRow(number, request.log_len + 1, request.params, prompt, log)
