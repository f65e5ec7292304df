from pddbridge.rpc.gen import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_SOURCE_UNSPECIFIED: _ClassVar[KvSource]
    KV_SOURCE_COMPUTE: _ClassVar[KvSource]
    KV_SOURCE_TRANSFER: _ClassVar[KvSource]

class TransferPriority(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_PRIORITY_NORMAL: _ClassVar[TransferPriority]
    TRANSFER_PRIORITY_URGENT: _ClassVar[TransferPriority]
    TRANSFER_PRIORITY_BACKGROUND: _ClassVar[TransferPriority]
KV_SOURCE_UNSPECIFIED: KvSource
KV_SOURCE_COMPUTE: KvSource
KV_SOURCE_TRANSFER: KvSource
TRANSFER_PRIORITY_NORMAL: TransferPriority
TRANSFER_PRIORITY_URGENT: TransferPriority
TRANSFER_PRIORITY_BACKGROUND: TransferPriority

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("name", "engine", "device", "epoch", "fingerprint", "model_name", "ready", "page_size", "num_pages", "max_context_tokens", "kv_bytes_per_token", "vocab_size", "kv_dtype", "layout", "num_running", "max_rows", "kv_links", "nixl_port", "links", "step_age_s", "draining", "max_step_tokens", "tokens_chosen", "engine_fallbacks")
    class TokensChosenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class EngineFallbacksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    KV_LINKS_FIELD_NUMBER: _ClassVar[int]
    NIXL_PORT_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    engine: str
    device: str
    epoch: int
    fingerprint: str
    model_name: str
    ready: bool
    page_size: int
    num_pages: int
    max_context_tokens: int
    kv_bytes_per_token: int
    vocab_size: int
    kv_dtype: str
    layout: str
    num_running: int
    max_rows: int
    kv_links: _containers.RepeatedScalarFieldContainer[str]
    nixl_port: int
    links: _containers.RepeatedCompositeFieldContainer[LinkState]
    step_age_s: float
    draining: bool
    max_step_tokens: int
    tokens_chosen: _containers.ScalarMap[str, int]
    engine_fallbacks: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., engine: _Optional[str] = ..., device: _Optional[str] = ..., epoch: _Optional[int] = ..., fingerprint: _Optional[str] = ..., model_name: _Optional[str] = ..., ready: _Optional[bool] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., vocab_size: _Optional[int] = ..., kv_dtype: _Optional[str] = ..., layout: _Optional[str] = ..., num_running: _Optional[int] = ..., max_rows: _Optional[int] = ..., kv_links: _Optional[_Iterable[str]] = ..., nixl_port: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkState, _Mapping]]] = ..., step_age_s: _Optional[float] = ..., draining: _Optional[bool] = ..., max_step_tokens: _Optional[int] = ..., tokens_chosen: _Optional[_Mapping[str, int]] = ..., engine_fallbacks: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LinkState(_message.Message):
    __slots__ = ("receiver", "link", "goodput_bytes_s", "wire_bytes_s", "round_trip_s", "queued_bytes", "num_connections", "kv_bytes", "kv_wire_bytes", "codec", "num_transfers", "address")
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_BYTES_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    receiver: str
    link: str
    goodput_bytes_s: float
    wire_bytes_s: float
    round_trip_s: float
    queued_bytes: int
    num_connections: int
    kv_bytes: int
    kv_wire_bytes: int
    codec: str
    num_transfers: int
    address: str
    def __init__(self, receiver: _Optional[str] = ..., link: _Optional[str] = ..., goodput_bytes_s: _Optional[float] = ..., wire_bytes_s: _Optional[float] = ..., round_trip_s: _Optional[float] = ..., queued_bytes: _Optional[int] = ..., num_connections: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., kv_wire_bytes: _Optional[int] = ..., codec: _Optional[str] = ..., num_transfers: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class LedgerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LedgerReply(_message.Message):
    __slots__ = ("total_pages", "free_pages", "cached_pages", "pinned_pages", "num_requests", "num_incoming_transfers", "num_outgoing_transfers", "computed_prompt_tokens", "computed_log_tokens", "sampled_tokens", "kv_bytes_received", "kv_bytes_sent", "frames_refused", "late_frames_dropped", "compilations_after_ready", "steps", "preemptions", "engine_fallbacks", "kv_pushes", "kv_link_fallbacks", "kv_wire_bytes_received", "kv_wire_bytes_sent", "kv_codecs", "kv_coding_ratio", "kv_codecs_declined", "host_pages", "host_bytes", "host_capacity_bytes", "host_hit_tokens", "host_pages_lost", "loop_lag_bounds_s", "loop_lag_counts", "link_turns", "steps_ahead", "rows_void", "tokens_chosen", "graphed_steps", "handshakes_refused", "calls_refused")
    class EngineFallbacksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class KvPushesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class KvLinkFallbacksEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class KvCodecsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LinkTurnsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TokensChosenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_INCOMING_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTGOING_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_LOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    LATE_FRAMES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    COMPILATIONS_AFTER_READY_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    KV_PUSHES_FIELD_NUMBER: _ClassVar[int]
    KV_LINK_FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    KV_WIRE_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    KV_WIRE_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    KV_CODECS_FIELD_NUMBER: _ClassVar[int]
    KV_CODING_RATIO_FIELD_NUMBER: _ClassVar[int]
    KV_CODECS_DECLINED_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_LOST_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_COUNTS_FIELD_NUMBER: _ClassVar[int]
    LINK_TURNS_FIELD_NUMBER: _ClassVar[int]
    STEPS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    ROWS_VOID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    GRAPHED_STEPS_FIELD_NUMBER: _ClassVar[int]
    HANDSHAKES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    CALLS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    total_pages: int
    free_pages: int
    cached_pages: int
    pinned_pages: int
    num_requests: int
    num_incoming_transfers: int
    num_outgoing_transfers: int
    computed_prompt_tokens: int
    computed_log_tokens: int
    sampled_tokens: int
    kv_bytes_received: int
    kv_bytes_sent: int
    frames_refused: int
    late_frames_dropped: int
    compilations_after_ready: int
    steps: int
    preemptions: int
    engine_fallbacks: _containers.ScalarMap[str, int]
    kv_pushes: _containers.ScalarMap[str, int]
    kv_link_fallbacks: _containers.ScalarMap[str, int]
    kv_wire_bytes_received: int
    kv_wire_bytes_sent: int
    kv_codecs: _containers.ScalarMap[str, int]
    kv_coding_ratio: float
    kv_codecs_declined: int
    host_pages: int
    host_bytes: int
    host_capacity_bytes: int
    host_hit_tokens: int
    host_pages_lost: int
    loop_lag_bounds_s: _containers.RepeatedScalarFieldContainer[float]
    loop_lag_counts: _containers.RepeatedScalarFieldContainer[int]
    link_turns: _containers.ScalarMap[str, int]
    steps_ahead: int
    rows_void: int
    tokens_chosen: _containers.ScalarMap[str, int]
    graphed_steps: int
    handshakes_refused: int
    calls_refused: int
    def __init__(self, total_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., pinned_pages: _Optional[int] = ..., num_requests: _Optional[int] = ..., num_incoming_transfers: _Optional[int] = ..., num_outgoing_transfers: _Optional[int] = ..., computed_prompt_tokens: _Optional[int] = ..., computed_log_tokens: _Optional[int] = ..., sampled_tokens: _Optional[int] = ..., kv_bytes_received: _Optional[int] = ..., kv_bytes_sent: _Optional[int] = ..., frames_refused: _Optional[int] = ..., late_frames_dropped: _Optional[int] = ..., compilations_after_ready: _Optional[int] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., engine_fallbacks: _Optional[_Mapping[str, int]] = ..., kv_pushes: _Optional[_Mapping[str, int]] = ..., kv_link_fallbacks: _Optional[_Mapping[str, int]] = ..., kv_wire_bytes_received: _Optional[int] = ..., kv_wire_bytes_sent: _Optional[int] = ..., kv_codecs: _Optional[_Mapping[str, int]] = ..., kv_coding_ratio: _Optional[float] = ..., kv_codecs_declined: _Optional[int] = ..., host_pages: _Optional[int] = ..., host_bytes: _Optional[int] = ..., host_capacity_bytes: _Optional[int] = ..., host_hit_tokens: _Optional[int] = ..., host_pages_lost: _Optional[int] = ..., loop_lag_bounds_s: _Optional[_Iterable[float]] = ..., loop_lag_counts: _Optional[_Iterable[int]] = ..., link_turns: _Optional[_Mapping[str, int]] = ..., steps_ahead: _Optional[int] = ..., rows_void: _Optional[int] = ..., tokens_chosen: _Optional[_Mapping[str, int]] = ..., graphed_steps: _Optional[int] = ..., handshakes_refused: _Optional[int] = ..., calls_refused: _Optional[int] = ...) -> None: ...

class WorkerCommand(_message.Message):
    __slots__ = ("open", "ingest", "seal", "set_priority", "add_target")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    INGEST_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    SET_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ADD_TARGET_FIELD_NUMBER: _ClassVar[int]
    open: Open
    ingest: Ingest
    seal: Seal
    set_priority: SetPriority
    add_target: PushTarget
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., ingest: _Optional[_Union[Ingest, _Mapping]] = ..., seal: _Optional[_Union[Seal, _Mapping]] = ..., set_priority: _Optional[_Union[SetPriority, _Mapping]] = ..., add_target: _Optional[_Union[PushTarget, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("request_id", "tenant", "prompt_ids", "sampling", "kv_source", "push_to", "decode", "log_ids", "timeout_s", "max_propose_tokens", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PUSH_TO_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    LOG_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_PROPOSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    kv_source: KvSource
    push_to: _containers.RepeatedCompositeFieldContainer[PushTarget]
    decode: bool
    log_ids: _containers.RepeatedScalarFieldContainer[int]
    timeout_s: float
    max_propose_tokens: int
    prompt_logprobs: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., kv_source: _Optional[_Union[KvSource, str]] = ..., push_to: _Optional[_Iterable[_Union[PushTarget, _Mapping]]] = ..., decode: _Optional[bool] = ..., log_ids: _Optional[_Iterable[int]] = ..., timeout_s: _Optional[float] = ..., max_propose_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class PushTarget(_message.Message):
    __slots__ = ("target", "host", "port", "epoch", "transfer_id", "first_token", "link", "nixl_port", "priority", "deadline_s")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    NIXL_PORT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    target: str
    host: str
    port: int
    epoch: int
    transfer_id: int
    first_token: int
    link: str
    nixl_port: int
    priority: TransferPriority
    deadline_s: float
    def __init__(self, target: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., epoch: _Optional[int] = ..., transfer_id: _Optional[int] = ..., first_token: _Optional[int] = ..., link: _Optional[str] = ..., nixl_port: _Optional[int] = ..., priority: _Optional[_Union[TransferPriority, str]] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class Ingest(_message.Message):
    __slots__ = ("position", "token_ids", "decode")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    decode: bool
    def __init__(self, position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., decode: _Optional[bool] = ...) -> None: ...

class Seal(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetPriority(_message.Message):
    __slots__ = ("target", "priority")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    target: str
    priority: TransferPriority
    def __init__(self, target: _Optional[str] = ..., priority: _Optional[_Union[TransferPriority, str]] = ...) -> None: ...

class WorkerEvent(_message.Message):
    __slots__ = ("reserved", "prefilled", "kv_complete", "pushed", "tokens", "ingested", "sealed", "failed", "prompt_scores")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    KV_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    INGESTED_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    reserved: Reserved
    prefilled: Prefilled
    kv_complete: KvComplete
    pushed: Pushed
    tokens: Tokens
    ingested: Ingested
    sealed: Sealed
    failed: Failed
    prompt_scores: PromptScores
    def __init__(self, reserved: _Optional[_Union[Reserved, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., kv_complete: _Optional[_Union[KvComplete, _Mapping]] = ..., pushed: _Optional[_Union[Pushed, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., ingested: _Optional[_Union[Ingested, _Mapping]] = ..., sealed: _Optional[_Union[Sealed, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., prompt_scores: _Optional[_Union[PromptScores, _Mapping]] = ...) -> None: ...

class PromptScores(_message.Message):
    __slots__ = ("position", "records")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    position: int
    records: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenRecord]
    def __init__(self, position: _Optional[int] = ..., records: _Optional[_Iterable[_Union[_common_pb2.TokenRecord, _Mapping]]] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("hit_tokens", "transfer_id", "epoch")
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    hit_tokens: int
    transfer_id: int
    epoch: int
    def __init__(self, hit_tokens: _Optional[int] = ..., transfer_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("computed_tokens",)
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    def __init__(self, computed_tokens: _Optional[int] = ...) -> None: ...

class KvComplete(_message.Message):
    __slots__ = ("received_tokens", "received_bytes", "received_wire_bytes")
    RECEIVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    received_tokens: int
    received_bytes: int
    received_wire_bytes: int
    def __init__(self, received_tokens: _Optional[int] = ..., received_bytes: _Optional[int] = ..., received_wire_bytes: _Optional[int] = ...) -> None: ...

class Pushed(_message.Message):
    __slots__ = ("target", "tokens", "bytes", "wire_bytes", "codec")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    target: str
    tokens: int
    bytes: int
    wire_bytes: int
    codec: str
    def __init__(self, target: _Optional[str] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., codec: _Optional[str] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("position", "records")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    position: int
    records: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenRecord]
    def __init__(self, position: _Optional[int] = ..., records: _Optional[_Iterable[_Union[_common_pb2.TokenRecord, _Mapping]]] = ...) -> None: ...

class Ingested(_message.Message):
    __slots__ = ("length",)
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    length: int
    def __init__(self, length: _Optional[int] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("length",)
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    length: int
    def __init__(self, length: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("code", "message", "target")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    target: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...
