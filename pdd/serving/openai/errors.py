"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}. Owns the map from PddError to it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pdd.errors import Code, PddError
from pdd.serving.admission_check import ContextLengthError, UnknownModelError
from pdd.serving.public_errors import public_message, retry_after_s

log = logging.getLogger(__name__)

_TYPES = {
    Code.INVALID_ARGUMENT: "invalid_request_error",
    Code.UNAUTHENTICATED: "authentication_error",
    Code.PERMISSION_DENIED: "permission_error",
    Code.NOT_FOUND: "invalid_request_error",
    Code.RESOURCE_EXHAUSTED: "rate_limit_error",
}


class BodyTooLargeError(PddError):
    """The body is longer than ``serving.max_body_bytes``; answered with 413, which no gRPC code stands for."""

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(Code.INVALID_ARGUMENT, f"the request body is larger than {max_body_bytes} bytes")


class HeadTooLargeError(PddError):
    """Request line and headers are longer than the door takes; answered with 431."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(Code.INVALID_ARGUMENT, f"the request line and headers are larger than {max_bytes} bytes")


class SlowBodyError(PddError):
    """The body did not arrive in time; answered with 408."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(Code.DEADLINE_EXCEEDED, f"the request body did not arrive within {limit_s:g} s")


def error_body(error: PddError) -> dict[str, object]:
    if isinstance(error, UnknownModelError):
        code: str | None = "model_not_found"
    elif isinstance(error, ContextLengthError):
        code = "context_length_exceeded"
    elif error.code is Code.UNAUTHENTICATED:
        code = "invalid_api_key"
    else:
        code = None if error.code is Code.INVALID_ARGUMENT else error.code.name.lower()
    return {"error": {"message": public_message(error), "type": _TYPES.get(error.code, "server_error"), "param": error.field, "code": code}}


# Those that no gRPC code stands for.
_STATUSES: dict[type[PddError], int] = {BodyTooLargeError: 413, HeadTooLargeError: 431, SlowBodyError: 408}


def error_response(error: PddError) -> Response:
    status = _STATUSES.get(type(error), error.code.value)
    headers: dict[str, str] = {}
    if (wait_s := retry_after_s(error)) is not None:
        headers["retry-after"] = str(wait_s)
    if error.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status, headers)


def from_validation(error: ValidationError, given: object) -> PddError:
    """The first mistake pydantic found in ``given``, as INVALID_ARGUMENT naming the field."""
    first = error.errors(include_url=False)[0]
    field = ".".join(_path(first["loc"], given, missing=first["type"] == "missing")) or None
    return PddError(Code.INVALID_ARGUMENT, f"{field or 'body'}: {first['msg']}", field)


def _path(loc: tuple[int | str, ...], given: object, missing: bool) -> Iterator[str]:
    """The parts of ``loc`` that lead through ``given``, and a missing field's name; pydantic has the kinds of a union among them."""
    for depth, part in enumerate(loc, 1):
        fields: dict[int | str, object] = dict(enumerate(given)) if isinstance(given, list) else given if isinstance(given, dict) else {}
        if part in fields:
            given = fields[part]
        elif not (missing and depth == len(loc)):
            continue
        yield str(part)


def internal(error: Exception) -> PddError:
    """A fault of ours: the log has the trace, the client only that it happened."""
    log.error("a request failed unexpectedly", exc_info=error)
    return PddError(Code.INTERNAL, "internal error")


async def on_pdd_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, PddError)
    return error_response(error)


async def on_http_exception(_request: Request, error: Exception) -> Response:
    """Unknown path, wrong method: Starlette's own answers, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    body = {"error": {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}}
    return JSONResponse(body, error.status_code, error.headers)


async def on_unexpected(_request: Request, _error: Exception) -> Response:
    """Starlette raises the error again after this answer, and the server logs it."""
    return error_response(PddError(Code.INTERNAL, "internal error"))
