"""Who a client is: API keys, their tenants and what each tenant may use. Owns the file of keys, which is read again when it changes.

Only hashes of keys are kept. Keys are 256 random bits, so one round of SHA-256 is as good as a slow hash: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from pdd.errors import Code, PddError
from pdd.strict_model import StrictModel
from pdd.user_yaml import read_yaml

log = logging.getLogger(__name__)

KEY_PREFIX: Final = "pdd-"
KEY_BYTES: Final = 32
MAX_KEY_CHARACTERS: Final = 256
CHECK_INTERVAL_S: Final = 1.0
_SCHEME: Final = "bearer "

# No slash: what stands after one in a cache's namespace is a salt of the tenant's own.
TenantName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Tenant(StrictModel):
    """``keys``: SHA-256 of each, in hex. ``max_concurrent``: generations at once, of which a call with n choices has n.
    ``tokens_per_minute``: prompt and output together; a minute's worth may be used at once. None: no limit.
    """

    keys: tuple[Digest, ...] = ()
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None


Tenants = dict[TenantName, Tenant]
_TENANTS: Final = TypeAdapter(Tenants)


class UnauthenticatedError(PddError):
    def __init__(self, message: str) -> None:
        super().__init__(Code.UNAUTHENTICATED, message)


class Accounts:
    """The tenants of one file. A change that cannot be read is logged and counted, and what was read before goes on."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError, one line per mistake."""
        self.num_refused = 0
        self.num_unreadable = 0
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._tenants = read_tenants(path)
        self._checked_at_s = clock()

    def tenant(self, name: str) -> Tenant | None:
        """None for one that is gone from the file."""
        return self._tenants.get(name)

    def authenticate(self, authorization: str | None) -> str:
        """The tenant whose key ``authorization`` ("Bearer ...") has. Raises UnauthenticatedError, which does not tell what was wrong with a
        key. The time it takes tells nothing about keys: every hash is compared, and in constant time.
        """
        self._reload()
        if not authorization:
            raise self._refusal("no API key was given: send it in the header 'Authorization: Bearer KEY'")
        if authorization[: len(_SCHEME)].lower() != _SCHEME or len(authorization) > MAX_KEY_CHARACTERS:
            raise self._refusal("the Authorization header is not of the form 'Bearer KEY'")
        given = digest(authorization[len(_SCHEME) :].strip())
        found = None
        for name, tenant in self._tenants.items():
            for known in tenant.keys:
                if hmac.compare_digest(given, known):
                    found = name
        if found is None:
            raise self._refusal("the API key is not valid")
        return found

    def _refusal(self, message: str) -> UnauthenticatedError:
        self.num_refused += 1
        return UnauthenticatedError(message)

    def _reload(self) -> None:
        now_s = self._clock()
        if now_s - self._checked_at_s < CHECK_INTERVAL_S:
            return
        self._checked_at_s = now_s
        try:
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._stamp = stamp
                self._tenants = read_tenants(self._path)
                log.info("%s: read again, %d tenants", self._path, len(self._tenants))
        except ValueError as error:
            self.num_unreadable += 1
            log.error("%s: changed and cannot be used, the keys read before stay: %s", self._path, error)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def read_tenants(path: Path) -> Tenants:
    """Raises ValueError naming the field."""
    raw = read_yaml("security.api_keys:", path)
    try:
        tenants = _TENANTS.validate_python({} if raw is None else raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"security.api_keys: {path}: {'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from error
    owners: dict[str, str] = {}
    for name, tenant in tenants.items():
        for key in tenant.keys:
            if owners.setdefault(key, name) != name:
                raise ValueError(f"security.api_keys: {path}: {name} has a key of {owners[key]}")
    return tenants


def add_key(path: Path, tenant: str) -> str:
    """Make a key for ``tenant`` and put its hash into the file, which is replaced in one step. Returns the key, which is nowhere else."""
    tenants = read_tenants(path) if path.exists() else {}
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    known = tenants.get(tenant, Tenant())
    raw = {name: entry.model_dump(mode="json", exclude_none=True) for name, entry in tenants.items()}
    raw[tenant] = known.model_copy(update={"keys": (*known.keys, digest(key))}).model_dump(mode="json", exclude_none=True)
    try:
        _TENANTS.validate_python(raw)
    except ValidationError as error:
        raise ValueError(f"tenant: given {tenant!r}, allowed lower-case letters, digits and hyphens, 40 at most") from error
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        yaml.safe_dump(raw, file, sort_keys=False)
    fresh.replace(path)
    return key


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes when the file does."""
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"security.api_keys: cannot read {path}: {error.strerror}") from error
    return status.st_mtime_ns, status.st_size, status.st_ino
