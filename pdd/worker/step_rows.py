"""Which rows the executor's next step has: what the scheduler plans of what requests need, as far as there are pages for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pdd.errors import Code
from pdd.fairness import TenantService
from pdd.worker.admission import Admission
from pdd.worker.batch import BatchRow
from pdd.worker.request import Phase, RequestState
from pdd.worker.scheduler import RowDemand, StepBudget, plan_step
from pddbridge.engine import MAX_SCORED_TOKENS

Fail = Callable[[RequestState, Code, str], None]


class StepRows:
    """``requests``: the executor's, as they are at each call, in order of arrival · ``fail``: ends a request that can never go on."""

    def __init__(
        self, requests: Mapping[str, RequestState], admission: Admission, service: TenantService, budget: StepBudget, fail: Fail
    ) -> None:
        self._requests = requests
        self._admission = admission
        self._service = service
        self._budget = budget
        self._fail = fail

    def plan(self) -> list[BatchRow]:
        """Rows that have pages for their new tokens. Who gets none stands still in this step, and its place goes to another."""
        stalled: set[str] = set()
        while True:
            able = [r for r in self._requests.values() if r.phase is Phase.ACTIVE and r.num_pending and r.request_id not in stalled]
            scored = [r for r in able if r.scores_pending]
            demands = [self._demand(r) for r in able if r not in scored[1:]]
            if not demands:
                return []
            rows = [BatchRow(self._requests[p.request_id], p.num_tokens, p.samples) for p in plan_step(demands, self._budget).rows]
            stalled |= {row.request.request_id for row in rows if not self._has_pages(row)}
            # The growth of a later row may have taken the pages of an earlier one.
            if all(row.request.phase is Phase.ACTIVE and row.request.request_id not in stalled for row in rows):
                return rows

    def _demand(self, r: RequestState) -> RowDemand:
        """One request is scored at a time, so many tokens a step as an engine scores."""
        most = min(r.num_pending, MAX_SCORED_TOKENS) if r.scores_pending else r.num_pending
        samples = r.decode and most == r.num_pending
        return RowDemand(r.request_id, r.order, most, samples, r.last_step, r.chunks_waited, self._service.of(r.tenant))

    def _has_pages(self, row: BatchRow) -> bool:
        request, num_tokens = row.request, row.request.kv_len + row.num_tokens
        if request.phase is not Phase.ACTIVE:
            return False
        if self._admission.grow(request, num_tokens, self._requests.values()):
            return True
        if request.phase is Phase.ACTIVE and not any(r.pages for r in self._requests.values() if r is not request):
            self._fail(request, Code.RESOURCE_EXHAUSTED, f"{num_tokens} tokens never fit this worker's pages")
        return False

    def count_waiting(self, rows: Sequence[BatchRow]) -> None:
        """Before what ``rows`` computed counts: which decode rows stood behind a chunk."""
        served = {row.request.request_id for row in rows}
        has_chunk = any(not (row.samples and row.num_tokens == 1) for row in rows)
        for request in self._requests.values():
            if request.request_id in served or not request.is_decode_row:
                request.chunks_waited = 0
            elif has_chunk:
                request.chunks_waited += 1
