"""Dataclasses to protobuf messages and back, unchanged. Everything that arrives is checked here again, whoever sent it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pddbridge.link_schedule import Priority
from pddbridge.rpc.gen import common_pb2 as pb
from pddbridge.rpc.gen import worker_pb2
from pddbridge.sampling_params import FinishReason, SamplingParams, TokenRecord

_FINISH_TO_PROTO: dict[FinishReason, pb.FinishReason] = {
    "stop": pb.FinishReason.FINISH_REASON_STOP,
    "length": pb.FinishReason.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PROTO = {number: reason for reason, number in _FINISH_TO_PROTO.items()}
_PRIORITY_TO_PROTO: dict[Priority, worker_pb2.TransferPriority] = {
    Priority.NORMAL: worker_pb2.TRANSFER_PRIORITY_NORMAL,
    Priority.URGENT: worker_pb2.TRANSFER_PRIORITY_URGENT,
    Priority.BACKGROUND: worker_pb2.TRANSFER_PRIORITY_BACKGROUND,
}
_PRIORITY_FROM_PROTO = {number: priority for priority, number in _PRIORITY_TO_PROTO.items()}


def priority_to_proto(priority: Priority) -> worker_pb2.TransferPriority:
    return _PRIORITY_TO_PROTO[priority]


def priority_from_proto(number: worker_pb2.TransferPriority, field: str) -> Priority:
    """Raises ValueError naming ``field`` for a class that is not known here."""
    if number not in _PRIORITY_FROM_PROTO:
        raise ValueError(f"{field}: given {number}, allowed {sorted(_PRIORITY_FROM_PROTO)}")
    return _PRIORITY_FROM_PROTO[number]


def check_token_ids(ids: Sequence[int] | np.ndarray, vocab_size: int, field: str) -> None:
    """Raises ValueError naming ``field``, index, value and range at the first entry that is not an integer in [0, vocab_size)."""
    for index, token_id in enumerate(ids):
        if isinstance(token_id, bool | np.bool_) or not isinstance(token_id, int | np.integer) or not 0 <= token_id < vocab_size:
            raise ValueError(f"{field}[{index}]: given {_shown(token_id)}, allowed token ids 0 to {vocab_size - 1}")


def params_to_proto(params: SamplingParams) -> pb.SamplingParams:
    """Sets are written in ascending order, so equal parameters have equal bytes."""
    return pb.SamplingParams(
        seed=params.seed,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=[pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias],
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        eos_token_ids=sorted(params.eos_token_ids),
        stop_token_ids=sorted(params.stop_token_ids),
        num_logprobs=params.num_logprobs,
        allowed_token_ids=sorted(params.allowed_token_ids),
        bad_words=[pb.TokenSequence(ids=word) for word in params.bad_words],
        logprob_token_ids=params.logprob_token_ids,
    )


def params_from_proto(message: pb.SamplingParams, vocab_size: int) -> SamplingParams:
    """Raises ValueError naming the field for a value out of range or an id outside [0, vocab_size)."""
    bias = tuple((entry.token_id, entry.bias) for entry in message.logit_bias)
    check_token_ids([token_id for token_id, _ in bias], vocab_size, "logit_bias")
    check_token_ids(message.eos_token_ids, vocab_size, "eos_token_ids")
    check_token_ids(message.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids(message.allowed_token_ids, vocab_size, "allowed_token_ids")
    check_token_ids(message.logprob_token_ids, vocab_size, "logprob_token_ids")
    for word in message.bad_words:
        check_token_ids(word.ids, vocab_size, "bad_words")
    return SamplingParams(
        seed=message.seed,
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k if message.HasField("top_k") else None,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=bias,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        eos_token_ids=frozenset(message.eos_token_ids),
        stop_token_ids=frozenset(message.stop_token_ids),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        allowed_token_ids=frozenset(message.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        logprob_token_ids=tuple(message.logprob_token_ids),
    )


def record_to_proto(record: TokenRecord) -> pb.TokenRecord:
    return pb.TokenRecord(
        token_id=record.token_id,
        logprob=record.logprob,
        top_logprobs=[pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in record.top_logprobs],
    )


def record_from_proto(message: pb.TokenRecord, vocab_size: int) -> TokenRecord:
    """Raises ValueError for an id outside [0, vocab_size)."""
    top = tuple((entry.token_id, entry.logprob) for entry in message.top_logprobs)
    check_token_ids([message.token_id], vocab_size, "token_id")
    check_token_ids([token_id for token_id, _ in top], vocab_size, "top_logprobs")
    return TokenRecord(message.token_id, logprob=message.logprob if message.HasField("logprob") else None, top_logprobs=top)


def finish_reason_to_proto(reason: FinishReason | None) -> pb.FinishReason:
    """None, a request that goes on, is UNSPECIFIED."""
    return pb.FinishReason.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(number: pb.FinishReason) -> FinishReason | None:
    """UNSPECIFIED is None. Raises ValueError for a number this version does not know."""
    if number == pb.FinishReason.FINISH_REASON_UNSPECIFIED:
        return None
    if number not in _FINISH_FROM_PROTO:
        raise ValueError(f"finish_reason: given {number}, allowed {sorted(_FINISH_FROM_PROTO)}")
    return _FINISH_FROM_PROTO[number]


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
