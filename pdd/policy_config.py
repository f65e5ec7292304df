"""The policy section of the launch config: every threshold that decides how a request runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pdd.strict_model import StrictModel


class PolicyConfig(StrictModel):
    """``pipeline``: "auto" decides per request; the others force one. ``direct_budget_s``: predicted wait for KV up to which
    "auto" goes direct. ``catch_up_chunk``: log tokens that main ingests at once while the relay runs on; above it "auto" catches up.
    """

    pipeline: Literal["auto", "direct", "relay"] = "auto"
    direct_budget_s: Annotated[float, Field(ge=0)] = 0.5
    handoff: Literal["auto", "one_shot", "catch_up"] = "auto"
    catch_up_chunk: Annotated[int, Field(ge=1)] = 64
    fallback_recompute: bool = True
