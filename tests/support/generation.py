"""Requests for coordinator tests, what they must yield, and what they did yield."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from pdd.serving.coordinator import Coordinator
from pdd.serving.request import Delta, GenerationRequest, Override, Timeline
from pddbridge.sampling_params import FinishReason, SamplingParams, TokenRecord
from pddbridge.stops import finish_reason
from tests.support.worker_script import TokenFunction, record

EOS = 2


def hashed_token(prompt_ids: Sequence[int], log_ids: Sequence[int]) -> int:
    """A token in [10, 299] that depends on every token before it and on its position; never EOS."""
    return 10 + zlib.crc32(repr((list(prompt_ids), list(log_ids))).encode()) % 290


def params(max_tokens: int = 24, **fields: object) -> SamplingParams:
    return SamplingParams(**{"seed": 1, "max_tokens": max_tokens, "eos_token_ids": frozenset({EOS}), **fields})


def make_request(
    name: str = "r",
    prompt_ids: Sequence[int] = tuple(range(40, 60)),
    sampling: SamplingParams | None = None,
    stop_strings: tuple[str, ...] = (),
    want_text: bool = False,
    timeout_s: float = 60.0,
    **override: object,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        tenant="default",
        prompt_ids=tuple(prompt_ids),
        sampling=sampling or params(),
        stop_strings=stop_strings,
        want_text=want_text,
        timeout_s=timeout_s,
        override=Override(**override),
    )


@dataclass(frozen=True)
class Outcome:
    """Everything a client of one request saw."""

    deltas: tuple[Delta, ...]

    @property
    def records(self) -> tuple[TokenRecord, ...]:
        return tuple(r for delta in self.deltas for r in delta.records)

    @property
    def ids(self) -> list[int]:
        return [r.token_id for r in self.records]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def origins(self) -> list[str]:
        return [delta.origin for delta in self.deltas for _ in delta.records]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason

    @property
    def timeline(self) -> Timeline:
        assert self.deltas[-1].timeline is not None
        return self.deltas[-1].timeline


async def collect(coordinator: Coordinator, request: GenerationRequest) -> Outcome:
    """Run to the end. Checks what holds for every request: one finish event, in the last delta; offsets and counts that fit."""
    deltas = [delta async for delta in coordinator.generate(request)]
    outcome = Outcome(tuple(deltas))
    assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert [delta.timeline is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    offset = 0
    for delta in deltas:
        assert delta.text_offset == offset
        offset += len(delta.text)
    timeline = outcome.timeline
    assert (timeline.relay_tokens, timeline.main_tokens) == (outcome.origins.count("relay"), outcome.origins.count("main"))
    return outcome


def expected(token: TokenFunction, request: GenerationRequest) -> tuple[list[TokenRecord], FinishReason]:
    """What a single worker would yield, stop strings aside."""
    log: list[TokenRecord] = []
    while True:
        ids = [r.token_id for r in log]
        log.append(record(request.sampling, request.prompt_ids, ids, token))
        reason = finish_reason(request.sampling, [*ids, log[-1].token_id])
        if reason is not None:
            return log, reason
