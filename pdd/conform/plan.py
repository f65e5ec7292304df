"""What a run of the ladder does: sizes, handoff positions, samplers, tolerances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdd.conform.prompts import PromptKind
from pdd.conform.side import Dtype, Sizes
from pddbridge.sampling_params import SamplingParams


@dataclass(frozen=True)
class Tolerance:
    """``logits``: largest difference over the oracle's largest logit · ``kv``: the same of one plane of one layer · ``tie``: logits within
    which two candidates count as tied, so that either is right.
    """

    logits: float
    kv: float
    tie: float


TOLERANCES: Final[dict[Dtype, Tolerance]] = {
    "float32": Tolerance(logits=2e-5, kv=2e-5, tie=1e-3),
    "bfloat16": Tolerance(logits=5e-2, kv=5e-2, tie=0.5),
}


# New tokens of L2's rows in one batch: a chunk, an extend, a decode row.
MIXED_STEP: Final = (40, 5, 1)
MIXED_STEP_TOKENS: Final = sum(MIXED_STEP)


@dataclass(frozen=True)
class Plan:
    """``prompt``: where its ids come from · ``prompt_tokens``: of the prompt that is handed over · ``handoffs``: log lengths at which it
    is · ``new_tokens``: that the receiver then makes · ``step_tokens``: of the largest step, so longer prompts come in chunks. Raises
    ValueError naming the field.
    """

    levels: tuple[str, ...]
    dtypes: tuple[Dtype, ...]
    seed: int = 0
    prompt_tokens: int = 270
    handoffs: tuple[int, ...] = (0, 1, 2, 5, 16)
    new_tokens: int = 20
    step_tokens: int = 128
    threads: int = 1
    prompt: PromptKind = "text"

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 2), ("new_tokens", 1), ("threads", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: given {getattr(self, name)}, allowed {least} or more")
        if not self.handoffs or min(self.handoffs) < 0 or len(set(self.handoffs)) != len(self.handoffs):
            raise ValueError(f"handoffs: given {list(self.handoffs)}, allowed different log lengths from 0")
        needed = max(MIXED_STEP_TOKENS, len(self.samplers) * (sum(self.handoffs) + len(self.handoffs) + 1))
        if self.step_tokens < needed:
            raise ValueError(f"step_tokens: given {self.step_tokens}, the rows of one step need {needed}")

    @property
    def samplers(self) -> dict[str, SamplingParams]:
        """By name. Sampling has no truncation, for which the oracle's margin would have no measure, and a penalty, which needs the log."""
        return {
            "greedy": SamplingParams(seed=self.seed, max_tokens=self.stream_tokens, temperature=0.0, ignore_eos=True),
            "sampled": SamplingParams(
                seed=self.seed, max_tokens=self.stream_tokens, temperature=0.8, repetition_penalty=1.1, ignore_eos=True
            ),
        }

    @property
    def stream_tokens(self) -> int:
        """Of the single-engine runs, so that every handoff's stream is within them."""
        return max(self.handoffs) + self.new_tokens

    @property
    def sizes(self) -> Sizes:
        """A row per sampler and handoff, and one per sampler that is only audited."""
        return Sizes(self.prompt_tokens + self.stream_tokens, len(self.samplers) * (len(self.handoffs) + 1), self.step_tokens)
