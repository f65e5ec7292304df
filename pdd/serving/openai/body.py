"""Reading a request's body within limits of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from pdd.serving.openai.errors import BodyTooLargeError, SlowBodyError

_MAX_DISCARDED_BYTES = 64 * 1024 * 1024


async def read_body(request: Request, max_body_bytes: int, limit_s: float) -> bytes:
    """Raises BodyTooLargeError, SlowBodyError; ClientDisconnect (Starlette's) when the client leaves meanwhile.

    Of a body that is too large the rest is read and thrown away, up to a bound: a client that is still sending would otherwise see a
    reset connection instead of the answer. One that waits for "100 Continue" is answered at once.
    """
    size = request.headers.get("content-length", "")
    declared_bytes = int(size) if size.isascii() and size.isdigit() and len(size) < 20 else 0
    if declared_bytes > max_body_bytes and "expect" in request.headers:
        raise BodyTooLargeError(max_body_bytes)
    kept = bytearray()
    num_bytes = 0
    try:
        async with asyncio.timeout(limit_s):
            async for data in request.stream():
                num_bytes += len(data)
                if num_bytes <= max_body_bytes:
                    kept += data
                elif num_bytes > _MAX_DISCARDED_BYTES:
                    break
    except TimeoutError as error:
        raise SlowBodyError(limit_s) from error
    if num_bytes > max_body_bytes:
        raise BodyTooLargeError(max_body_bytes)
    return bytes(kept)
