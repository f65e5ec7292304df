"""What clients ask in one run: requests drawn from a random generator. Pure; owns the mix."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal

from pdd.chaos.model import EOS_ID, VOCAB_SIZE, byte_id
from pdd.serving.request import HandoffName, PipelineName
from pdd.serving.sampling_check import SamplingBounds, SamplingWish, sampling_params
from pddbridge.sampling_params import SamplingParams

Door = Literal["http", "grpc"]
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz "
_LETTER_BIAS: Final = 8.0


@dataclass(frozen=True)
class Cancel:
    """The client goes away: once it has ``after_tokens``, or ``after_s`` after it asked, whichever comes first; None: not for that."""

    after_tokens: int | None = None
    after_s: float | None = None


@dataclass(frozen=True)
class Ask:
    """One request. ``at_s``: from the start of the run · ``stream``: over HTTP; gRPC always streams · ``salt``: its prefix cache, which
    requests of the same run may share · ``pipeline``, ``handoff``, ``handoff_at``: overrides, None for what the policy decides.
    """

    number: int
    at_s: float
    door: Door
    stream: bool
    prompt: tuple[int, ...]
    wish: SamplingWish
    seed: int
    stop: tuple[str, ...]
    salt: str
    pipeline: PipelineName | None = None
    handoff: HandoffName | None = None
    handoff_at: int | None = None
    cancel: Cancel | None = None

    @property
    def max_tokens(self) -> int:
        assert self.wish.max_tokens is not None
        return self.wish.max_tokens

    def params(self) -> SamplingParams:
        """As the doors derive them."""
        bounds = SamplingBounds(VOCAB_SIZE, frozenset({EOS_ID}), len(self.prompt) + self.max_tokens, self.max_tokens)
        return sampling_params(self.wish, self.seed, bounds)

    def text(self) -> str:
        """One line of a printed plan."""
        how = "" if self.wish.temperature == 0.0 else f" sampled with {self.seed}"
        if self.pipeline is not None:
            how += f" {self.pipeline}" + ("" if self.handoff_at is None else f" to {self.handoff_at}")
        if self.stop:
            how += f" stop {list(self.stop)}"
        if self.cancel is not None:
            ends = [] if self.cancel.after_tokens is None else [f"after {self.cancel.after_tokens} tokens"]
            ends += [] if self.cancel.after_s is None else [f"after {self.cancel.after_s:.2f} s"]
            how += f" leaves {' or '.join(ends)}"
        door = self.door if self.door == "grpc" or self.stream else "http, whole"
        return f"{self.at_s:6.2f} s  request {self.number}: {len(self.prompt)} + {self.max_tokens} tokens, {door}, cache {self.salt}{how}"


def draw_traffic(rng: random.Random, run: str, num_requests: int, window_s: float, max_prompt: int, max_new: int) -> tuple[Ask, ...]:
    """``num_requests`` over ``window_s``, in order of time. ``run`` keeps prefix caches of runs apart. Most prompts continue one of three
    bases, some repeat an earlier one, some are new; half of them come in clumps.
    """
    bases = [_tokens(rng, rng.randint(max_prompt // 4, max_prompt * 3 // 4)) for _ in range(3)]
    asks: list[Ask] = []
    times = sorted(
        rng.choice((0.0, window_s / 3, window_s / 2)) if rng.random() < 0.5 else rng.uniform(0, window_s) for _ in range(num_requests)
    )
    for number, at_s in enumerate(times):
        prompt = _prompt(rng, bases, [ask.prompt for ask in asks], max_prompt)
        asks.append(_ask(rng, run, number, at_s, prompt, max_new))
    return tuple(asks)


def _ask(rng: random.Random, run: str, number: int, at_s: float, prompt: tuple[int, ...], max_new: int) -> Ask:
    max_tokens = rng.choice((1, 2, rng.randint(3, max_new // 3), rng.randint(max_new // 2, max_new), max_new))
    letters = rng.random() < 0.3
    sampled = letters or rng.random() < 0.5
    wish = SamplingWish(
        max_tokens=max_tokens,
        temperature=rng.choice((0.7, 1.0)) if sampled else 0.0,
        top_k=rng.choice((None, 20)) if sampled else None,
        top_p=rng.choice((None, 0.9)) if sampled else None,
        repetition_penalty=rng.choice((None, 1.2)),
        frequency_penalty=rng.choice((None, 0.4)),
        logit_bias=tuple((byte_id(letter), _LETTER_BIAS) for letter in LETTERS) if letters else (),
        ignore_eos=rng.random() < 0.8,
    )
    pipelines: tuple[PipelineName | None, ...] = (None, "direct", "relay")
    pipeline = rng.choices(pipelines, (5, 2, 3))[0]
    cancel = None
    if rng.random() < 0.12:
        cancel = Cancel(after_tokens=rng.randint(1, max_tokens)) if rng.random() < 0.5 else Cancel(after_s=rng.uniform(0.01, 1.0))
    return Ask(
        number=number,
        at_s=at_s,
        door=rng.choice(("http", "grpc")),
        stream=rng.random() < 0.75,
        prompt=prompt,
        wish=wish,
        seed=rng.randrange(2**32),
        stop=rng.choice(((), ("q",), ("zx", "e t", "v"))) if letters else (),
        salt=f"{run}-{rng.choice(('a', 'a', 'b'))}",
        pipeline=pipeline,
        handoff_at=rng.randint(0, max(1, max_tokens)) if pipeline == "relay" and rng.random() < 0.5 else None,
        cancel=cancel,
    )


def _prompt(rng: random.Random, bases: list[tuple[int, ...]], earlier: list[tuple[int, ...]], max_prompt: int) -> tuple[int, ...]:
    kind = rng.random()
    if kind < 0.15 and earlier:
        return rng.choice(earlier)
    if kind < 0.65:
        return (*rng.choice(bases), *_tokens(rng, rng.randint(1, max_prompt // 4)))
    if kind < 0.72:
        return _tokens(rng, rng.randint(1, 2))
    return _tokens(rng, rng.randint(3, max_prompt))


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(len(LETTERS), VOCAB_SIZE) for _ in range(count))
