"""Case 92 through the public API: tokens do not depend on how many rows run beside them, also past 256 tokens, where kernels switch."""

from __future__ import annotations

import pytest

from pddbridge.sampling_params import SamplingParams
from tests.support.clients import body_of, complete_all
from tests.system.conftest import Running
from tests.system.test_stream_equality import check_moved, prompt_of

pytestmark = pytest.mark.system

GREEDY = SamplingParams(seed=1, max_tokens=14, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(seed=92, max_tokens=14, temperature=0.9, top_p=0.95, repetition_penalty=1.1, ignore_eos=True)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_92_copies_of_a_request_beside_it_change_nothing(tiny: Running, params: SamplingParams) -> None:
    """1, 2 and 7 at once; position 256 is computed by relay in some, by main in others, by prefill in none."""
    prompt = prompt_of(250, seed=92)
    answers = []
    for at_once in (1, 2, 7):
        bodies = [
            {
                **body_of(tiny.model, prompt, params, pipeline="relay", handoff_at=3 + index),
                "cache_salt": f"{params.seed}-{at_once}-{index}",
            }
            for index in range(at_once)
        ]
        for index, answer in enumerate(complete_all(tiny.url, bodies, at_once)):
            check_moved(answer, 3 + index, len(prompt), params.max_tokens)
            answers.append(answer.ids)
    assert len(set(answers[0])) > 3, "a constant answer would prove nothing"
    assert answers == [answers[0]] * 10
