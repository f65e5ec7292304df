"""/v1/chat/completions: the shape of its answers."""

from __future__ import annotations

from pdd.serving.choice_log import ChoiceLog
from pdd.serving.openai.logprobs import chat_logprobs
from pdd.serving.openai.prompt_parts import Echo
from pdd.serving.text.model import TextModel
from pddbridge.sampling_params import FinishReason


class ChatShape:
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, text: TextModel) -> None:
        self._text = text

    def opening(self, index: int) -> dict[str, object] | None:
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def part(self, index: int, text: str, logprobs: dict[str, object] | None) -> dict[str, object]:
        return self._chunk(index, {"content": text}, logprobs, None)

    def closing(self, index: int, finish_reason: FinishReason) -> dict[str, object]:
        return self._chunk(index, {}, None, finish_reason)

    def whole(self, index: int, text: str, logprobs: dict[str, object] | None, finish_reason: FinishReason) -> dict[str, object]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def logprobs_of(self, log: ChoiceLog, first: int, echoed: Echo | None = None) -> dict[str, object]:
        assert echoed is None, "a chat is not echoed"
        return chat_logprobs(self._text, log.records[first:])

    @staticmethod
    def _chunk(
        index: int, delta: dict[str, str], logprobs: dict[str, object] | None, finish_reason: FinishReason | None
    ) -> dict[str, object]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
