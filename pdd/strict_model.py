"""The base of every section of a launch config: unknown fields are refused, values do not change, infinities are no numbers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
