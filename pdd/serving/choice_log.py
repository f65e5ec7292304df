"""What one choice has said so far, and the usage that results. Shared by the doors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdd.errors import Code, PddError
from pdd.serving.request import Delta, GenerationRequest, Origin, Timeline
from pdd.serving.text.detokenizer import Detokenizer
from pdd.serving.text.model import TextModel
from pddbridge.sampling_params import FinishReason, TokenRecord


class ChoiceLog:
    """Collects the deltas of one generation. ``records`` and ``offsets`` have one entry per accepted token; an offset is the number of
    characters that the tokens before it complete, which is not what was streamed while a stop string is held back."""

    def __init__(self, text_model: TextModel, request: GenerationRequest, first_offset: int = 0) -> None:
        """``first_offset``: of the first token, where text comes before it."""
        self._detokenizer = Detokenizer(text_model.vocabulary, request.prompt_ids, request.with_special)
        self.prompt_records: tuple[TokenRecord, ...] | None = None
        self._num_characters = first_offset
        self.begun = False
        self.text = ""
        self.records: list[TokenRecord] = []
        self.offsets: list[int] = []
        self.origins: list[tuple[Origin, int]] = []
        self.finish_reason: FinishReason | None = None
        self.timeline: Timeline | None = None

    def accept(self, delta: Delta) -> None:
        """Append. Raises PddError(INTERNAL) for a delta after the last one."""
        if self.finish_reason is not None:
            raise PddError(Code.INTERNAL, "the answer went on after its end")
        self.begun = True
        self.prompt_records = delta.prompt_records or self.prompt_records
        self.text += delta.text
        for record in delta.records:
            self.records.append(record)
            self.offsets.append(self._num_characters)
            self._num_characters += len(self._detokenizer.push(record.token_id))
        if delta.records:
            self._count(delta.origin, len(delta.records))
        self.finish_reason = delta.finish_reason
        self.timeline = delta.timeline

    def end(self) -> FinishReason:
        """Raises PddError(INTERNAL) when the generation closed without saying why: never pass that on as success."""
        if self.finish_reason is None:
            raise PddError(Code.INTERNAL, "the answer ended without a finish reason")
        return self.finish_reason

    @property
    def token_ids(self) -> list[int]:
        return [record.token_id for record in self.records]

    def _count(self, origin: Origin, num_tokens: int) -> None:
        if self.origins and self.origins[-1][0] == origin:
            num_tokens += self.origins.pop()[1]
        self.origins.append((origin, num_tokens))


@dataclass(frozen=True)
class Usage:
    """``cached_tokens``: prompt tokens that main decode already held."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def usage(requests: Sequence[GenerationRequest], logs: Sequence[ChoiceLog], num_choices: int) -> Usage:
    """Totals over all choices. A prompt counts once however many choices it has, and its hit is that of its first choice."""
    firsts = range(0, len(requests), num_choices)
    timelines = [logs[first].timeline for first in firsts]
    return Usage(
        prompt_tokens=sum(len(requests[first].prompt_ids) for first in firsts),
        completion_tokens=sum(len(log.records) for log in logs),
        cached_tokens=sum(timeline.main_hit_tokens for timeline in timelines if timeline is not None),
    )
