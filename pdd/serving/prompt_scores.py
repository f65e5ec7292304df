"""Log-probabilities of a prompt's tokens: a prefill worker computes the whole prompt and tells them, before anything is generated.

The KV stays in that worker's prefix cache, so the prefill that follows computes none of it again.
"""

from __future__ import annotations

import logging

from pdd.errors import Code, PddError
from pdd.serving.holders import Attach, Holder, Holders
from pdd.serving.request import GenerationRequest
from pdd.serving.reservation import REQUEST_ERRORS
from pdd.serving.worker_events import Failed, Prefilled, PromptScored
from pdd.serving.worker_pool import WorkerPool
from pddbridge.sampling_params import TokenRecord

_log = logging.getLogger(__name__)


async def score_prompt(request: GenerationRequest, pool: WorkerPool) -> tuple[TokenRecord, ...]:
    """One record per prompt token; the first has no log-probability. Another worker is asked when one is lost.

    Raises PddError: UNAVAILABLE when no prefill worker is left, and what a worker says of the request itself. Cancelling lets go at once.
    """
    records = [TokenRecord(request.prompt_ids[0])]
    if len(request.prompt_ids) == 1:
        return tuple(records)
    holders = Holders(request, pool.survival.max_attempts)
    try:
        tried: frozenset[str] = frozenset()
        while len(records) < len(request.prompt_ids):
            worker = pool.route("prefill", tried, request=request)
            if worker is None:
                raise PddError(Code.UNAVAILABLE, "prompt log-probabilities: no prefill worker is left to compute them")
            tried |= {worker.name}
            attach = Attach("prefill", computes=True, decode=False, prompt_logprobs=request.prompt_logprobs)
            await _listen(holders, holders.open(worker, attach), records)
    except BaseException:
        await holders.drop_all()
        raise
    await holders.release_all()
    if [record.token_id for record in records] != list(request.prompt_ids):
        raise PddError(Code.INTERNAL, "prompt log-probabilities: what was scored is not the prompt")
    return tuple(records)


async def _listen(holders: Holders, holder: Holder, records: list[TokenRecord]) -> None:
    """Until the whole prompt is scored or the worker is lost."""
    while (item := await holders.next()) is not None:
        _, event = item
        match event:
            case PromptScored(position, scored):
                if position > len(records):
                    raise PddError(Code.INTERNAL, f"prompt log-probabilities: told from position {position}, known are {len(records)}")
                records += scored[len(records) - position :]  # some again after a preemption or from another worker
            case Prefilled():
                holders.release(holder)
                return
            case Failed(code, message):
                holders.drop(holder)
                holder.worker.note_failure(event)
                _log.warning("worker %s was lost while it scored a prompt: %s", holder.worker.name, message)
                if code in REQUEST_ERRORS or code is Code.RESOURCE_EXHAUSTED:
                    raise PddError(code, f"{holder.worker.name}: {message}")
                return
