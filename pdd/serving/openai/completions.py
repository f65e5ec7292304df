"""/v1/completions: the shape of its answers."""

from __future__ import annotations

from pdd.serving.choice_log import ChoiceLog
from pdd.serving.openai.logprobs import completion_logprobs
from pdd.serving.openai.prompt_parts import Echo
from pdd.serving.text.model import TextModel
from pddbridge.sampling_params import FinishReason


class CompletionShape:
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, text: TextModel) -> None:
        self._text = text

    def opening(self, index: int) -> dict[str, object] | None:
        return None

    def part(self, index: int, text: str, logprobs: dict[str, object] | None) -> dict[str, object]:
        return self._choice(index, text, logprobs, None)

    def closing(self, index: int, finish_reason: FinishReason) -> dict[str, object]:
        return self._choice(index, "", None, finish_reason)

    def whole(self, index: int, text: str, logprobs: dict[str, object] | None, finish_reason: FinishReason) -> dict[str, object]:
        return self._choice(index, text, logprobs, finish_reason)

    def logprobs_of(self, log: ChoiceLog, first: int, echoed: Echo | None = None) -> dict[str, object]:
        if echoed is None:
            return completion_logprobs(self._text, log.records[first:], log.offsets[first:])
        assert log.prompt_records is not None, "echo with logprobs scores the prompt"
        records = [*log.prompt_records, *log.records[first:]]
        return completion_logprobs(self._text, records, [*echoed.offsets, *log.offsets[first:]])

    @staticmethod
    def _choice(index: int, text: str, logprobs: dict[str, object] | None, finish_reason: FinishReason | None) -> dict[str, object]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
