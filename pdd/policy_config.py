"""The policy section of the launch config: every threshold that decides how a request runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pdd.handoff_config import HandoffConfig
from pdd.strict_model import StrictModel

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


class LocalConfig(StrictModel):
    """When a request is finished on the relay and its transfer over the wide area is cut. ``max_share``: of the latest ``window``
    requests that may be so, at most; 0: none. Once it is reached, none until half of it is free again. ``min_miss_tokens``: what main
    lacks at least · ``max_output_tokens``: predicted output at most (the quantile of :class:`LengthsConfig`) · ``margin``: main's KV must
    be predicted to come so many times later, after prefill, than the relay's last token · ``max_relay_load``: share of the relay's rows
    in use at most · ``overrun``: past so many times the predicted output main is brought in after all.
    """

    max_share: Share = 0.05
    window: Count = 100
    min_miss_tokens: Count = 2048
    max_output_tokens: Count = 32
    margin: Annotated[float, Field(ge=1)] = 1.5
    max_relay_load: Share = 0.5
    overrun: Annotated[float, Field(ge=1)] = 2.0


class LengthsConfig(StrictModel):
    """Output lengths learned per tenant. ``quantile``: that decisions go by · ``min_samples``: of a tenant, below which all tenants
    together count, and below which of all together the request's own limit does · ``half_life``: a sample has lost half its weight after
    so many more · ``max_tenants``: that are remembered, the latest.
    """

    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.9
    min_samples: Count = 20
    half_life: Count = 200
    max_tenants: Count = 256


class AlignmentConfig(StrictModel):
    """Over which requests the prefix hit rates of prefill and main are compared: the latest ``window``, none older than ``window_s``."""

    window: Count = 500
    window_s: Seconds = 600.0


class BackgroundConfig(StrictModel):
    """Transfers to main that go on, in the lowest class, for their prefix alone when their request has ended on the relay.

    ``max_transfers``: at once, 0: none · ``max_bytes``: of all of them · ``min_tokens``: that main lacks, below which it is not worth it ·
    ``min_gap``: between the hit rates of prefill and main, below which main is well enough off · ``deadline_s``: after which one is
    given up · ``busy_s``: they are given up when what others have queued on the link takes longer than this · ``max_candidates``:
    requests whose transfer was cut that are remembered, for ``candidate_s``, and brought to main when the link is idle.
    """

    max_transfers: Annotated[int, Field(ge=0)] = 4
    max_bytes: Count = 4 * 1024**3
    min_tokens: Count = 256
    min_gap: Annotated[float, Field(ge=-1, le=1)] = 0.0
    deadline_s: Seconds = 60.0
    busy_s: Annotated[float, Field(ge=0)] = 1.0
    max_candidates: Annotated[int, Field(ge=0)] = 8
    candidate_s: Seconds = 120.0


class PolicyConfig(StrictModel):
    """``pipeline``: "auto" decides per request; the others force one. ``direct_budget_s``: predicted wait for KV, beyond prefill, up to
    which "auto" goes direct. ``ttft_target_s``: the objective, None: as soon as can be; where prefill leaves more room below it than
    ``direct_budget_s``, that room is the budget. ``relay_load_weight``: how much dearer the relay gets as it fills: the budget is
    multiplied by 1 + weight * load / (1 - load). ``lateness_half_life_s``, ``max_lateness_s``: predictions of main's KV are put off by how
    late it came to direct requests lately, at most so much, halved after so long without news; 0: never. ``catch_up_chunk``: log tokens
    that main ingests at once while the relay runs on; above it "auto" catches up. ``num_decisions_kept``: for ``GET /debug/decisions``.
    """

    pipeline: Literal["auto", "direct", "relay", "local"] = "auto"
    direct_budget_s: Annotated[float, Field(ge=0)] = 0.5
    ttft_target_s: Annotated[float, Field(gt=0)] | None = None
    relay_load_weight: Annotated[float, Field(ge=0)] = 0.25
    lateness_half_life_s: Seconds = 10.0
    max_lateness_s: Annotated[float, Field(ge=0)] = 2.0
    local: LocalConfig = LocalConfig()
    lengths: LengthsConfig = LengthsConfig()
    alignment: AlignmentConfig = AlignmentConfig()
    background: BackgroundConfig = BackgroundConfig()
    num_decisions_kept: Count = 256
    handoff: Literal["auto", "one_shot", "catch_up", "overlap"] = "auto"
    handoff_rules: HandoffConfig = HandoffConfig()
    catch_up_chunk: Annotated[int, Field(ge=1)] = 64
    fallback_recompute: bool = True
