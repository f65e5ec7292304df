"""How an endpoint of the OpenAI door words its answers: the part in which chat and completions differ."""

from __future__ import annotations

from typing import Protocol

from pdd.serving.choice_log import ChoiceLog
from pdd.serving.openai.prompt_parts import Echo
from pddbridge.sampling_params import FinishReason


class Shape(Protocol):
    """Methods return one entry of ``choices``. ``logprobs``: what ``logprobs_of`` returned, or None when not asked for."""

    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, object] | None:
        """What a stream says before the first token, if anything."""
        ...

    def part(self, index: int, text: str, logprobs: dict[str, object] | None) -> dict[str, object]: ...
    def closing(self, index: int, finish_reason: FinishReason) -> dict[str, object]: ...
    def whole(self, index: int, text: str, logprobs: dict[str, object] | None, finish_reason: FinishReason) -> dict[str, object]: ...
    def logprobs_of(self, log: ChoiceLog, first: int, echoed: Echo | None = None) -> dict[str, object]:
        """Records of the tokens from ``first`` on, after those of the prompt where it is echoed."""
        ...
