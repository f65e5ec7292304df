"""Typed errors that cross processes and front doors. One code, one clear line; each front door maps the code to its own shape."""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """Names are gRPC's; values are the HTTP status the OpenAI door answers with."""

    INVALID_ARGUMENT = 400
    UNAUTHENTICATED = 401
    PERMISSION_DENIED = 403
    NOT_FOUND = 404
    RESOURCE_EXHAUSTED = 429
    CANCELLED = 499
    INTERNAL = 500
    UNAVAILABLE = 503
    DEADLINE_EXCEEDED = 504


class PddError(Exception):
    """``field`` names the caller's field where one is to blame. ``retry_after_s``: when trying again may help, where that is known."""

    def __init__(self, code: Code, message: str, field: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
