from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterRequest(_message.Message):
    __slots__ = ("name", "epoch", "role", "site", "control", "kv", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    role: str
    site: str
    control: str
    kv: str
    fingerprint: str
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[str] = ..., site: _Optional[str] = ..., control: _Optional[str] = ..., kv: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("lease_s", "draining")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    draining: bool
    def __init__(self, lease_s: _Optional[float] = ..., draining: _Optional[bool] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("name", "epoch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerState]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerState, _Mapping]]] = ...) -> None: ...

class AddRequest(_message.Message):
    __slots__ = ("role", "count")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    role: str
    count: int
    def __init__(self, role: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("role", "count")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    role: str
    count: int
    def __init__(self, role: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class WorkerState(_message.Message):
    __slots__ = ("name", "role", "site", "epoch", "state", "reason", "num_held", "lease_left_s", "failures")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    site: str
    epoch: int
    state: str
    reason: str
    num_held: int
    lease_left_s: float
    failures: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., site: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., num_held: _Optional[int] = ..., lease_left_s: _Optional[float] = ..., failures: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...
