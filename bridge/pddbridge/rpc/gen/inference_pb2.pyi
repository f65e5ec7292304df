from pddbridge.rpc.gen import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "chat", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "num_logprobs", "prompt_logprobs", "tokens_only", "cache_salt", "timeout_s", "override")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_ONLY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    OVERRIDE_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: TokenIds
    chat: Chat
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[_common_pb2.LogitBias]
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    num_logprobs: int
    prompt_logprobs: int
    tokens_only: bool
    cache_salt: str
    timeout_s: float
    override: PipelineOverride
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[_common_pb2.LogitBias, _Mapping]]] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., num_logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., tokens_only: _Optional[bool] = ..., cache_salt: _Optional[str] = ..., timeout_s: _Optional[float] = ..., override: _Optional[_Union[PipelineOverride, _Mapping]] = ...) -> None: ...

class PipelineOverride(_message.Message):
    __slots__ = ("pipeline", "handoff", "handoff_at")
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_AT_FIELD_NUMBER: _ClassVar[int]
    pipeline: str
    handoff: str
    handoff_at: int
    def __init__(self, pipeline: _Optional[str] = ..., handoff: _Optional[str] = ..., handoff_at: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("tokens", "text", "origin", "finish_reason", "usage", "timeline", "prompt_tokens")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenRecord]
    text: str
    origin: _common_pb2.Origin
    finish_reason: _common_pb2.FinishReason
    usage: Usage
    timeline: Timeline
    prompt_tokens: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenRecord]
    def __init__(self, tokens: _Optional[_Iterable[_Union[_common_pb2.TokenRecord, _Mapping]]] = ..., text: _Optional[str] = ..., origin: _Optional[_Union[_common_pb2.Origin, str]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ..., prompt_tokens: _Optional[_Iterable[_Union[_common_pb2.TokenRecord, _Mapping]]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("pipeline", "pipeline_reason", "handoff", "relay_tokens", "main_tokens", "wan_kv_bytes", "wan_kv_tokens", "main_hit_tokens", "main_prefill_tokens", "prefill_done_s", "relay_kv_s", "main_kv_s", "handoff_start_s", "handoff_done_s", "ttft_s", "second_token_s", "e2e_s", "max_itl_s", "fallbacks", "wan_kv_wire_bytes", "decision", "predicted_kv_s", "kv_s", "predicted_output_tokens", "ended_on", "transfer", "transfer_reason", "wan_kv_saved_bytes", "redecision", "handoff_reason", "handoff_predicted_gap_s", "handoff_gap_s", "handoff_duplicates", "handoff_rewinds", "handoff_cover_s", "handoff_left_s")
    PIPELINE_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_REASON_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    RELAY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAN_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAN_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAIN_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAIN_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DONE_S_FIELD_NUMBER: _ClassVar[int]
    RELAY_KV_S_FIELD_NUMBER: _ClassVar[int]
    MAIN_KV_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_START_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_DONE_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    SECOND_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    E2E_S_FIELD_NUMBER: _ClassVar[int]
    MAX_ITL_S_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    WAN_KV_WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_KV_S_FIELD_NUMBER: _ClassVar[int]
    KV_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_ON_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_REASON_FIELD_NUMBER: _ClassVar[int]
    WAN_KV_SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REDECISION_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_REASON_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_PREDICTED_GAP_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_GAP_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_REWINDS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_COVER_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    pipeline: str
    pipeline_reason: str
    handoff: str
    relay_tokens: int
    main_tokens: int
    wan_kv_bytes: int
    wan_kv_tokens: int
    main_hit_tokens: int
    main_prefill_tokens: int
    prefill_done_s: float
    relay_kv_s: float
    main_kv_s: float
    handoff_start_s: float
    handoff_done_s: float
    ttft_s: float
    second_token_s: float
    e2e_s: float
    max_itl_s: float
    fallbacks: int
    wan_kv_wire_bytes: int
    decision: str
    predicted_kv_s: float
    kv_s: float
    predicted_output_tokens: int
    ended_on: str
    transfer: str
    transfer_reason: str
    wan_kv_saved_bytes: int
    redecision: str
    handoff_reason: str
    handoff_predicted_gap_s: float
    handoff_gap_s: float
    handoff_duplicates: int
    handoff_rewinds: int
    handoff_cover_s: float
    handoff_left_s: float
    def __init__(self, pipeline: _Optional[str] = ..., pipeline_reason: _Optional[str] = ..., handoff: _Optional[str] = ..., relay_tokens: _Optional[int] = ..., main_tokens: _Optional[int] = ..., wan_kv_bytes: _Optional[int] = ..., wan_kv_tokens: _Optional[int] = ..., main_hit_tokens: _Optional[int] = ..., main_prefill_tokens: _Optional[int] = ..., prefill_done_s: _Optional[float] = ..., relay_kv_s: _Optional[float] = ..., main_kv_s: _Optional[float] = ..., handoff_start_s: _Optional[float] = ..., handoff_done_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., second_token_s: _Optional[float] = ..., e2e_s: _Optional[float] = ..., max_itl_s: _Optional[float] = ..., fallbacks: _Optional[int] = ..., wan_kv_wire_bytes: _Optional[int] = ..., decision: _Optional[str] = ..., predicted_kv_s: _Optional[float] = ..., kv_s: _Optional[float] = ..., predicted_output_tokens: _Optional[int] = ..., ended_on: _Optional[str] = ..., transfer: _Optional[str] = ..., transfer_reason: _Optional[str] = ..., wan_kv_saved_bytes: _Optional[int] = ..., redecision: _Optional[str] = ..., handoff_reason: _Optional[str] = ..., handoff_predicted_gap_s: _Optional[float] = ..., handoff_gap_s: _Optional[float] = ..., handoff_duplicates: _Optional[int] = ..., handoff_rewinds: _Optional[int] = ..., handoff_cover_s: _Optional[float] = ..., handoff_left_s: _Optional[float] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "max_context_tokens", "vocab_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_context_tokens: int
    vocab_size: int
    def __init__(self, name: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ...) -> None: ...
