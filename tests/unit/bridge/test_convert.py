"""Parameters and records survive the wire unchanged, and nothing out of range comes off it."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pddbridge.rpc.convert import (
    check_token_ids,
    finish_reason_from_proto,
    finish_reason_to_proto,
    params_from_proto,
    params_to_proto,
    record_from_proto,
    record_to_proto,
)
from pddbridge.rpc.gen import common_pb2 as pb
from pddbridge.sampling import sample
from pddbridge.sampling_params import SamplingParams, TokenRecord

VOCAB = 331
IDS = st.integers(0, VOCAB - 1)
REAL = st.floats(-1e30, 1e30)

PARAMS = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 1e30),
    top_k=st.none() | st.integers(1, 2**31 - 1),
    top_p=st.floats(1e-30, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(1e-30, 1e30),
    presence_penalty=REAL,
    frequency_penalty=REAL,
    logit_bias=st.dictionaries(IDS, REAL, max_size=4).map(lambda biases: tuple(biases.items())),
    min_tokens=st.integers(0, 2**31 - 1),
    ignore_eos=st.booleans(),
    eos_token_ids=st.frozensets(IDS, max_size=4),
    stop_token_ids=st.frozensets(IDS, max_size=4),
    num_logprobs=st.integers(0, 2**31 - 1),
    allowed_token_ids=st.frozensets(IDS, max_size=4),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    logprob_token_ids=st.lists(IDS, max_size=3).map(tuple),
)


@given(PARAMS)
@settings(max_examples=300)
def test_every_parameter_survives_the_wire(params: SamplingParams) -> None:
    """Case 66, the derived stop set included."""
    wire = params_to_proto(params).SerializeToString()
    arrived = params_from_proto(pb.SamplingParams.FromString(wire), VOCAB)
    assert arrived == params
    assert arrived.stop_set == params.stop_set
    assert params_to_proto(arrived).SerializeToString() == wire


def test_no_parameter_is_forgotten() -> None:
    """A field added to one side only would otherwise pass unseen."""
    assert {field.name for field in fields(SamplingParams)} == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert {field.name for field in fields(TokenRecord)} == {field.name for field in pb.TokenRecord.DESCRIPTOR.fields}


def test_absence_is_not_zero() -> None:
    params = SamplingParams(seed=0, max_tokens=1)
    message = params_to_proto(params)
    assert not message.HasField("top_k")
    assert not message.HasField("num_logprobs")
    assert params_from_proto(params_to_proto(replace(params, num_logprobs=0)), VOCAB).num_logprobs == 0
    assert params_from_proto(message, VOCAB).num_logprobs is None


def test_a_result_does_not_depend_on_whether_the_parameters_crossed_a_wire() -> None:
    """0.7 and 0.9 have no float32: they are rounded where parameters are made, so nobody ever samples with the unrounded value."""
    params = SamplingParams(seed=3, max_tokens=9, temperature=0.7, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    assert params.temperature == float(np.float32(0.7)) != 0.7
    arrived = params_from_proto(params_to_proto(params), VOCAB)
    logits = np.random.default_rng(1).normal(0, 2, VOCAB).astype(np.float32)
    log = list(range(40))
    for position in range(40):
        assert sample(logits, params, [1], log[:position], position) == sample(logits, arrived, [1], log[:position], position)


@given(st.integers(0, 2**31), st.none() | st.floats(-1e30, 0), st.lists(st.tuples(st.integers(0, 2**31), st.floats(-1e30, 0)), max_size=25))
def test_records_survive_the_wire(token_id: int, logprob: float | None, top: list[tuple[int, float]]) -> None:
    def rounded(value: float) -> float:
        return float(np.float32(value))

    record = TokenRecord(token_id % VOCAB, None if logprob is None else rounded(logprob), tuple((i % VOCAB, rounded(x)) for i, x in top))
    wire = record_to_proto(record).SerializeToString()
    assert record_from_proto(pb.TokenRecord.FromString(wire), VOCAB) == record


def test_a_sampled_record_survives_the_wire() -> None:
    logits = np.random.default_rng(2).normal(0, 2, VOCAB).astype(np.float32)
    logits[3] = -np.inf
    record = sample(logits, SamplingParams(seed=3, max_tokens=9, num_logprobs=VOCAB), [1], [], 0)
    assert len(record.top_logprobs) == VOCAB
    assert record.top_logprobs[-1] == (3, -math.inf)
    assert record_from_proto(record_to_proto(record), VOCAB) == record


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31, 2**63, -(2**63), True, 1.0, "1", None])
def test_ids_outside_the_vocabulary_are_refused(bad: object) -> None:
    """Case 78."""
    with pytest.raises(ValueError, match=rf"^prompt\[2\]: given .*, allowed token ids 0 to {VOCAB - 1}$"):
        check_token_ids([0, VOCAB - 1, bad], VOCAB, "prompt")  # type: ignore[list-item]


def test_ids_of_numpy_are_ids() -> None:
    check_token_ids(np.array([0, VOCAB - 1], dtype=np.int32), VOCAB, "prompt")
    with pytest.raises(ValueError, match=r"prompt\[0\]: given"):
        check_token_ids(np.array([VOCAB], dtype=np.int32), VOCAB, "prompt")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"min_p": 2.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty"),
        ({"logit_bias": [pb.LogitBias(token_id=1, bias=math.nan)]}, "logit_bias"),
        ({"logit_bias": [pb.LogitBias(token_id=VOCAB, bias=1)]}, "logit_bias"),
        ({"logit_bias": [pb.LogitBias(token_id=4, bias=1)] * 2}, "logit_bias"),
        ({"eos_token_ids": [-1]}, "eos_token_ids"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"max_tokens": 2**32 - 1}, "max_tokens"),
    ],
)
def test_what_is_out_of_range_on_the_wire_is_refused_by_name(change: dict[str, object], field: str) -> None:
    message = params_to_proto(SamplingParams(seed=1, max_tokens=5))
    message.MergeFrom(pb.SamplingParams(**change))  # type: ignore[arg-type]
    if change.get(field) == 0:  # proto3 merges no zeros
        setattr(message, field, 0)
    with pytest.raises(ValueError, match=rf"^{field}(\[\d+\])?: given .*, allowed "):
        params_from_proto(message, VOCAB)


def test_values_without_a_float32_are_refused_on_construction() -> None:
    with pytest.raises(ValueError, match=r"^frequency_penalty: given 1e\+39, allowed finite"):
        SamplingParams(seed=1, max_tokens=1, frequency_penalty=1e39)
    with pytest.raises(ValueError, match=r"^top_p: given 0\.0, allowed more than 0"):
        SamplingParams(seed=1, max_tokens=1, top_p=1e-60)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=r"^seed: given"):
            SamplingParams(seed=seed, max_tokens=1)


@pytest.mark.parametrize("field", ["token_id", "top_logprobs"])
def test_records_with_foreign_ids_are_refused(field: str) -> None:
    message = (
        pb.TokenRecord(token_id=VOCAB) if field == "token_id" else pb.TokenRecord(token_id=0, top_logprobs=[pb.TopLogprob(token_id=-1)])
    )
    with pytest.raises(ValueError, match=rf"^{field}\[0\]: given"):
        record_from_proto(message, VOCAB)


def test_finish_reasons() -> None:
    for reason in ("stop", "length", None):
        assert finish_reason_from_proto(finish_reason_to_proto(reason)) == reason  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="finish_reason: given 99"):
        finish_reason_from_proto(99)  # type: ignore[arg-type]
