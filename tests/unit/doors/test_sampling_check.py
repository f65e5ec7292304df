"""Sampling wishes to SamplingParams: rounding that survives the wire, limits, seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.errors import Code, PddError
from pdd.serving.sampling_check import GREEDY_BELOW, SamplingBounds, SamplingWish, choice_seed, sampling_params, unsigned_seed
from pddbridge.rpc.convert import params_from_proto, params_to_proto
from pddbridge.sampling_params import SamplingParams

VOCAB = 300
BOUNDS = SamplingBounds(VOCAB, frozenset({0, 2}), room_tokens=40, default_max_tokens=7)

wishes = st.builds(
    SamplingWish,
    max_tokens=st.none() | st.integers(-2, 40),
    min_tokens=st.none() | st.integers(-1, 41),
    temperature=st.none() | st.floats(),
    top_k=st.none() | st.integers(-3, 2**40),
    top_p=st.none() | st.floats(-0.1, 1.1),
    min_p=st.none() | st.floats(-0.1, 1.1),
    repetition_penalty=st.none() | st.floats(0, 3),
    presence_penalty=st.none() | st.floats(-3, 3),
    frequency_penalty=st.none() | st.floats(-3, 3),
    logit_bias=st.lists(st.tuples(st.integers(-1, VOCAB), st.floats(-101, 101)), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(-1, VOCAB), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    num_logprobs=st.none() | st.integers(-1, 21),
)


def made(wish: SamplingWish) -> SamplingParams | PddError:
    try:
        return sampling_params(wish, 5, BOUNDS)
    except PddError as error:
        return error


@given(wishes)
def test_what_is_accepted_survives_the_wire_and_what_is_not_names_its_field(wish: SamplingWish) -> None:
    found = made(wish)
    if isinstance(found, PddError):
        assert found.code is Code.INVALID_ARGUMENT
        assert found.field in {*SamplingWish.__dataclass_fields__, "logprobs"}
        return
    assert params_from_proto(params_to_proto(found), VOCAB) == found
    assert 1 <= found.max_tokens <= BOUNDS.room_tokens
    assert found.min_tokens <= found.max_tokens
    assert found.temperature == 0 or found.temperature >= np.float32(GREEDY_BELOW)
    assert 0 < found.top_p <= 1
    assert all(math.isfinite(bias) for _, bias in found.logit_bias)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -(10**400)])
def test_numbers_that_are_none(field: str, value: float) -> None:
    found = made(SamplingWish(**{field: value}))
    assert isinstance(found, PddError)
    assert found.field == field


def test_bounds_are_inclusive() -> None:
    widest = SamplingWish(
        temperature=100.0, top_p=1.0, min_p=1.0, presence_penalty=-2.0, frequency_penalty=2.0, logit_bias=((0, 100.0), (299, -100.0))
    )
    assert isinstance(made(widest), SamplingParams)
    assert made(SamplingWish(repetition_penalty=100.0)).repetition_penalty == 100.0
    assert made(SamplingWish(top_k=1)).top_k == 1
    assert made(SamplingWish(top_k=VOCAB - 1)).top_k == VOCAB - 1
    assert made(SamplingWish(top_k=VOCAB)).top_k is None


def test_default_max_tokens_never_exceeds_the_room() -> None:
    assert made(SamplingWish()).max_tokens == 7
    tight = SamplingBounds(VOCAB, frozenset(), room_tokens=3, default_max_tokens=7)
    assert sampling_params(SamplingWish(), 1, tight).max_tokens == 3


def test_choice_seeds_are_those_documented() -> None:
    seed = 0x0123456789ABCDEF
    assert choice_seed(seed, 0) == seed
    # b2sum -l 64 of efcdab8967452301 02000000, read little-endian
    assert choice_seed(seed, 2) == 5925060427180100071
    assert len({choice_seed(seed, choice) for choice in range(16)} | {choice_seed(seed + 1, choice) for choice in range(16)}) == 32


@given(st.integers(-(2**63), 2**64 - 1))
def test_seeds_become_unsigned(seed: int) -> None:
    assert unsigned_seed(seed) == seed % 2**64


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_beyond_64_bits(seed: int) -> None:
    with pytest.raises(PddError, match="seed"):
        unsigned_seed(seed)
