"""Stop rules on every accepted token: EOS, user ids, min_tokens, max_tokens; alike whoever proposed the token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pddbridge.sampling import sample
from pddbridge.sampling_params import FinishReason, SamplingParams
from pddbridge.stops import finish_reason

EOS, USER, VOCAB = 2, 5, 9
BASE = SamplingParams(seed=7, max_tokens=8, eos_token_ids=frozenset({EOS}), stop_token_ids=frozenset({USER}))


@pytest.mark.parametrize(
    ("params", "log", "expected"),
    [
        (BASE, [], None),
        (BASE, [1], None),
        (BASE, [EOS], "stop"),
        (BASE, [1, USER], "stop"),
        (BASE, [EOS, 1], None),  # only the last token decides
        (replace(BASE, ignore_eos=True), [EOS], None),
        (replace(BASE, ignore_eos=True), [USER], "stop"),
        (replace(BASE, max_tokens=1), [1], "length"),
        (replace(BASE, max_tokens=1), [EOS], "stop"),
        (replace(BASE, max_tokens=2), [1], None),
        (replace(BASE, max_tokens=2), [1, 1], "length"),
        (replace(BASE, ignore_eos=True, max_tokens=1), [EOS], "length"),
        (replace(BASE, min_tokens=2), [1, EOS], None),
        (replace(BASE, min_tokens=2), [1, 1, EOS], "stop"),
        (replace(BASE, min_tokens=2, max_tokens=2), [1, EOS], "length"),
    ],
)
def test_finish_reason(params: SamplingParams, log: list[int], expected: FinishReason | None) -> None:
    assert finish_reason(params, log) == expected


def generate(params: SamplingParams, log: list[int]) -> tuple[list[int], FinishReason]:
    """Go on from ``log`` as any holder does: sample, append, ask."""
    log = list(log)
    logits = np.zeros(VOCAB, dtype=np.float32)
    while True:
        log.append(sample(logits, params, [EOS] * 6, log, len(log)).token_id)
        reason = finish_reason(params, log)
        if reason is not None:
            return log, reason


@pytest.mark.parametrize("min_tokens", range(6))
@pytest.mark.parametrize("handoff", range(6))
def test_forced_eos_comes_right_after_min_tokens(min_tokens: int, handoff: int) -> None:
    """Case 67: with a prompt full of EOS (the prompt does not count), wherever the log moved to another holder."""
    params = replace(BASE, max_tokens=20, min_tokens=min_tokens, logit_bias=((EOS, 100.0),))
    log, reason = generate(params, [])
    assert (len(log), log[-1], reason) == (min_tokens + 1, EOS, "stop")
    assert EOS not in log[:-1]
    if handoff <= min_tokens:
        assert generate(params, log[:handoff]) == (log, reason)


def test_ignored_eos_runs_to_the_length() -> None:
    """Case 43: EOS forced and ignored: max_tokens of it, finish reason length."""
    assert generate(replace(BASE, max_tokens=5, ignore_eos=True, logit_bias=((EOS, 100.0),)), []) == ([EOS] * 5, "length")


def test_ignored_eos_with_min_tokens_leaves_the_last_id_reachable() -> None:
    params = replace(BASE, max_tokens=4, min_tokens=3, ignore_eos=True, logit_bias=((VOCAB - 1, 100.0),))
    assert generate(params, []) == ([VOCAB - 1] * 4, "length")


@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    st.integers(0, 6),
    st.integers(1, 12),
    st.booleans(),
    st.integers(0, 12),
)
def test_accounting_is_the_same_wherever_the_log_was_handed_over(
    tokens: list[int], min_tokens: int, max_tokens: int, ignore_eos: bool, handoff: int
) -> None:
    """Case 44: whoever accepts token by token stops at the same place with the same count as one who accepted them all."""
    params = replace(BASE, min_tokens=min_tokens, max_tokens=max_tokens, ignore_eos=ignore_eos)

    def accept(log: list[int], proposed: list[int]) -> tuple[list[int], FinishReason | None]:
        for token_id in proposed:
            log = [*log, token_id]
            reason = finish_reason(params, log)
            if reason is not None:
                return log, reason
        return log, None

    whole = accept([], tokens)
    relayed, reason = accept([], tokens[:handoff])
    assert ((relayed, reason) if reason is not None else accept(relayed, tokens[handoff:])) == whole
    ended = [i for i, t in enumerate(tokens, 1) if (t in params.stop_set and i > min_tokens) or i >= max_tokens]
    assert len(whole[0]) == (ended[0] if ended else len(tokens))
