"""The launch config's ``flow`` section: who waits at the edge, how many, how long, and what a refused or a stalled client is told."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from pdd.strict_model import StrictModel


class FlowConfig(StrictModel):
    """``growth_reserve_tokens``: of a request's output, for which main must have room before it starts; what it makes beyond that it gets
    page by page · ``rows_factor``: requests per row of the main workers' steps that may run at once; above 1 they take turns.

    ``max_waiting_requests``, ``max_waiting_tokens`` (prompts and reserved output): bounds of the queue at the edge, beyond which the tenant
    that has most there is refused · ``max_wait_s``: a request that has waited so long is refused, and so is one that would by the measured
    rate of completions · ``min_retry_after_s``, ``max_retry_after_s``: bounds of what refused clients are told.

    ``stalled_client_s``: a client that takes nothing of what lies ready for it for so long is cut off.
    """

    growth_reserve_tokens: Annotated[int, Field(ge=0)] = 256
    rows_factor: Annotated[float, Field(gt=0, le=64)] = 2.0
    max_waiting_requests: Annotated[int, Field(ge=0)] = 256
    max_waiting_tokens: Annotated[int, Field(ge=0)] = 1_000_000
    max_wait_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    min_retry_after_s: Annotated[float, Field(ge=1, le=3600)] = 1.0
    max_retry_after_s: Annotated[float, Field(ge=1, le=3600)] = 60.0
    stalled_client_s: Annotated[float, Field(gt=0, le=3600)] = 60.0

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> FlowConfig:
        if self.min_retry_after_s > self.max_retry_after_s:
            raise ValueError(f"min_retry_after_s: given {self.min_retry_after_s:g}, above max_retry_after_s {self.max_retry_after_s:g}")
        return self
