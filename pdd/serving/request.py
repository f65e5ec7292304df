"""What front doors hand to the coordinator and get back. Frozen data; text is already part of what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pddbridge.sampling_params import FinishReason, SamplingParams, TokenRecord

Origin = Literal["relay", "main"]
PipelineName = Literal["direct", "relay", "local"]
HandoffName = Literal["one_shot", "catch_up", "overlap"]


@dataclass(frozen=True)
class Override:
    """A client's wish, honoured only where the launch config allows it. ``handoff_at``: relay exactly that many tokens, then hand off;
    with "overlap" at least that many: main decodes too from there.
    """

    pipeline: PipelineName | None = None
    handoff: HandoffName | None = None
    handoff_at: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One generation. ``request_id`` is internal and made once; a client's own id is only echoed by its front door.

    ``tenant`` is the prefix-cache namespace (tenant and cache salt). ``want_text`` False: token-out, ``stop_strings`` is empty.
    ``prompt_logprobs``: score the prompt's tokens, with so many of the most likely beside each. ``prompt_only``: generate nothing.
    ``with_special``: special tokens are part of the text; ``include_stop``: so is what stops it.
    """

    request_id: str
    tenant: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop_strings: tuple[str, ...]
    want_text: bool
    timeout_s: float
    override: Override
    prompt_logprobs: int | None = None
    prompt_only: bool = False
    with_special: bool = False
    include_stop: bool = False


@dataclass(frozen=True)
class Timeline:
    """What happened to a request. ``*_s``: seconds since it was received, None when it did not happen. See pdd.v1.Timeline."""

    pipeline: str
    pipeline_reason: str
    handoff: str | None
    relay_tokens: int
    main_tokens: int
    wan_kv_bytes: int
    wan_kv_wire_bytes: int
    wan_kv_tokens: int
    main_hit_tokens: int
    main_prefill_tokens: int
    prefill_done_s: float | None
    relay_kv_s: float | None
    main_kv_s: float | None
    handoff_start_s: float | None
    handoff_done_s: float | None
    ttft_s: float | None
    second_token_s: float | None
    e2e_s: float | None
    max_itl_s: float | None
    fallbacks: int
    decision: str = ""
    predicted_kv_s: float | None = None
    kv_s: float | None = None
    predicted_output_tokens: int | None = None
    ended_on: str = ""
    transfer: str = "none"
    transfer_reason: str = ""
    wan_kv_saved_bytes: int = 0
    redecision: str = ""
    handoff_reason: str = ""
    handoff_predicted_gap_s: float | None = None
    handoff_gap_s: float | None = None
    handoff_cover_s: float | None = None
    handoff_left_s: float | None = None
    handoff_duplicates: int = 0
    handoff_rewinds: int = 0


@dataclass(frozen=True)
class Delta:
    """Newly accepted tokens (usually one) and the text they release, which may be empty while a stop string or a character is incomplete.

    ``text_offset`` counts characters of text emitted before. The last delta of a request has ``finish_reason`` and ``timeline``;
    text held back until then is in it. The first has ``prompt_records`` where they were asked for: one per prompt token, whose first has
    no log-probability. Tokens after a stop-string match are neither counted nor streamed.
    """

    records: tuple[TokenRecord, ...]
    text: str
    text_offset: int
    origin: Origin
    finish_reason: FinishReason | None = None
    timeline: Timeline | None = None
    prompt_records: tuple[TokenRecord, ...] | None = None
