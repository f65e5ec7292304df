"""Which rows the next step has. Pure: a function of what the requests need and of the step's budget; no arrays, no pages, no roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RowDemand:
    """A request with ``num_pending`` (>= 1) tokens to compute.

    ``samples``: the last pending token's logits choose a token. ``order``: arrival, lower is older. ``last_step``: number of the step
    in which the request last had a row, 0 for never. ``chunks_waited``: steps that computed a chunk while this decode row was left out.
    ``tenant_service``: what its tenant has had (:class:`pdd.fairness.TenantService`); lower comes first.
    """

    request_id: str
    order: int
    num_pending: int
    samples: bool
    last_step: int
    chunks_waited: int = 0
    tenant_service: int = 0

    @property
    def is_decode(self) -> bool:
        return self.samples and self.num_pending == 1


@dataclass(frozen=True)
class StepBudget:
    """Bounds of one step: new tokens over all rows, and rows. ``max_decode_wait_chunks`` (>= 1): no decode row is left out of more
    chunk-bearing steps than this in a row.
    """

    max_step_tokens: int
    max_rows: int
    max_decode_wait_chunks: int = 1


@dataclass(frozen=True)
class PlannedRow:
    """``samples`` only when the row reaches the end of what its request has pending."""

    request_id: str
    num_tokens: int
    samples: bool


@dataclass(frozen=True)
class StepPlan:
    rows: tuple[PlannedRow, ...]


def plan_step(demands: Sequence[RowDemand], budget: StepBudget) -> StepPlan:
    """Decode rows first, then prefill chunks and extends.

    * Decode rows get a token each, least recently served first. While anything else waits, one row and one token are kept for it, so that a
      steady load of decode rows cannot starve a prompt; unless that would leave out a decode row that has waited long enough.
    * Of what is left, the oldest chunk of the least served tenant is sure of half, so that it always advances; the rest goes to tenants in
      the order of their service and within one to those that need least, so that a short prompt does not wait behind a long one and the
      tail of a prompt shares its step; what nobody else needs goes back to the first.
    """
    decodes = sorted((d for d in demands if d.is_decode), key=_least_recent)
    chunks = sorted((d for d in demands if not d.is_decode), key=lambda d: (d.tenant_service, d.order))
    limit = min(budget.max_rows, budget.max_step_tokens)
    kept_back = 1 if chunks else 0
    if decodes and chunks and limit == 1 and _least_recent(decodes[0]) < _least_recent(min(chunks, key=_least_recent)):
        kept_back = 0  # one row in all: take turns
    if any(d.chunks_waited >= budget.max_decode_wait_chunks for d in decodes[limit - kept_back :]):
        chunks, kept_back = [], 0
    decodes = decodes[: limit - kept_back]
    rows = [PlannedRow(d.request_id, 1, True) for d in decodes]
    rows += _plan_chunks(chunks, budget.max_step_tokens - len(rows), budget.max_rows - len(rows))
    return StepPlan(tuple(rows))


def _plan_chunks(chunks: Sequence[RowDemand], num_tokens: int, num_rows: int) -> list[PlannedRow]:
    if not chunks or num_tokens < 1 or num_rows < 1:
        return []
    if num_rows == 1:
        head, others = min(chunks, key=_least_recent), []
    else:
        head, others = chunks[0], sorted(chunks[1:], key=lambda d: (d.tenant_service, d.num_pending, d.order))
    share = min(head.num_pending, (num_tokens + 1) // 2 if others else num_tokens)
    left = num_tokens - share
    given: list[tuple[RowDemand, int]] = []
    for demand in others[: num_rows - 1]:
        if left == 0:
            break
        take = min(demand.num_pending, left)
        given.append((demand, take))
        left -= take
    given.insert(0, (head, min(head.num_pending, share + left)))
    return [PlannedRow(d.request_id, n, d.samples and n == d.num_pending) for d, n in given]


def _least_recent(demand: RowDemand) -> tuple[int, int]:
    return demand.last_step, demand.order
