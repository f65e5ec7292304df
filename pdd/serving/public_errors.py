"""What clients are told of an error: everything about their own mistakes, and of ours neither addresses nor paths."""

from __future__ import annotations

import math
import re
from typing import Final

from pdd.errors import Code, PddError

# The message is about what the client sent, in its own words.
_CLIENTS_OWN: Final = frozenset({Code.INVALID_ARGUMENT, Code.UNAUTHENTICATED, Code.PERMISSION_DENIED, Code.NOT_FOUND})
_DEFAULT_RETRY_AFTER_S: Final = {Code.RESOURCE_EXHAUSTED: 1.0, Code.UNAVAILABLE: 1.0}
_ADDRESS: Final = re.compile(
    r"""(?:(?:ipv4|ipv6|unix|dns):\S+                     # as gRPC names peers
    |\[[0-9a-fA-F:]+\]:\d+                              # [::1]:80
    |\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b               # 10.0.0.1:80
    |\b(?:[0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{1,4}\b     # fe80::1
    |\b[a-zA-Z][a-zA-Z0-9.-]*:\d{2,5}\b)             # host:80
    """,
    re.VERBOSE,
)
_PATH: Final = re.compile(r"(?<![\w/])(?:/[\w.+-]+){2,}/?|\b[A-Za-z]:\\\S+")


def public_message(error: PddError) -> str:
    """Safe to send to whoever asked."""
    if error.code in _CLIENTS_OWN:
        return error.message
    return _PATH.sub("[path]", _ADDRESS.sub("[address]", error.message))


def retry_after_s(error: PddError) -> int | None:
    """Whole seconds for a Retry-After; None where trying again does not help, or nobody knows when."""
    given = error.retry_after_s if error.retry_after_s is not None else _DEFAULT_RETRY_AFTER_S.get(error.code)
    return None if given is None else max(1, math.ceil(given))
