"""What every front door stands on: the coordinator behind it, the model's text, and the launch config's serving section."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdd.config import ServingConfig
from pdd.policy.outcomes import DecisionRecord
from pdd.serving.accounts import Accounts
from pdd.serving.request import Delta, GenerationRequest
from pdd.serving.text.model import TextModel


class ModelLimits(Protocol):
    """The served model as its smallest worker allows it. ``max_context_tokens`` is prompt plus output."""

    @property
    def model_name(self) -> str: ...
    @property
    def max_context_tokens(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


class Generator(Protocol):
    """The coordinator, as the doors see it. ``generate`` raises PddError; closing what it returns cancels the request at every holder."""

    @property
    def limits(self) -> ModelLimits: ...
    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]: ...


def _not_counted(_door: str) -> None:
    """Nobody counts."""


@dataclass(frozen=True)
class Front:
    """``unhealthy``: names of workers that cannot be used now; nothing when the service is healthy. ``decisions``: of the latest
    requests, oldest first. ``accounts``: of the clients' API keys; None: none are asked for. ``stalled_after_s``: a client that takes
    nothing of what lies ready for so long is cut off; ``stalled`` is told the door.
    """

    generator: Generator
    unhealthy: Callable[[], Sequence[str]]
    text: TextModel
    serving: ServingConfig
    accounts: Accounts | None = None
    decisions: Callable[[], Sequence[DecisionRecord]] | None = None
    stalled_after_s: float = 60.0
    stalled: Callable[[str], None] = _not_counted
