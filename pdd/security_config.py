"""The launch config's ``security`` section: certificates, API keys, limits of connections. Owns which addresses may not be bound."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pdd.strict_model import StrictModel
from pddbridge.tls import TlsFiles

COORDINATOR = "coordinator"  # name and role of the coordinator's process


class SecurityConfig(StrictModel):
    """``worker_tls``: "mutual": every port of every worker (gRPC and KV over TCP) takes only peers with a certificate, for a name of the
    topology, of an authority in ``ca``; "off": plaintext, which only loopback addresses may have. ``cert`` and ``key``: PEM files of each
    process; {name} and {site} in them stand for the process's own, so there may be one certificate per process or one per site. Paths
    are as the processes see them, relative ones from where they were started.

    ``door_cert`` and ``door_key``: TLS for both front doors. ``api_keys``: a file of tenants and hashes of their keys; without it everybody
    is one tenant. ``public_health``, ``public_metrics``: whether /health and gRPC health, and /metrics, answer without a key.
    ``allow_plaintext``: an address that is not loopback may be bound without TLS, and KV may take NIXL within a site although it is not
    encrypted. ``max_connections``: per front door. ``header_timeout_s``: within which a client must have sent a request's headers, or the
    TLS handshake.
    """

    worker_tls: Literal["off", "mutual"] = "off"
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    door_cert: str | None = None
    door_key: str | None = None
    api_keys: str | None = None
    public_health: bool = True
    public_metrics: bool = False
    allow_plaintext: bool = False
    max_connections: Annotated[int, Field(ge=1, le=65536)] = 1024
    header_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0

    @model_validator(mode="after")
    def _files_are_whole(self) -> SecurityConfig:
        if self.worker_tls == "mutual":
            for field in ("ca", "cert", "key"):
                if getattr(self, field) is None:
                    raise ValueError(f"{field}: not given, which worker_tls: mutual needs")
        if (self.door_cert is None) != (self.door_key is None):
            raise ValueError("door_cert, door_key: one given without the other")
        return self

    @property
    def door_files(self) -> tuple[str, str] | None:
        """Certificate and key of the doors; None: plaintext."""
        return None if self.door_cert is None or self.door_key is None else (self.door_cert, self.door_key)

    def worker_files(self, name: str, site: str) -> TlsFiles | None:
        """Files of the process ``name``, a worker or the coordinator; None where worker_tls is off."""
        if self.ca is None or self.cert is None or self.key is None or self.worker_tls == "off":
            return None
        return TlsFiles(Path(self.ca), _filled(self.cert, name, site), _filled(self.key, name, site))

    def allows_nixl(self) -> bool:
        """NIXL writes memory over connections that it makes itself and does not encrypt."""
        return self.worker_tls == "off" or self.allow_plaintext

    def check_hosts(self, workers: Iterable[tuple[str, str]], doors: str) -> None:
        """``workers``: (field, host) of each. Raises ValueError for an address that others can reach and that would speak plaintext."""
        if self.allow_plaintext:
            return
        if self.worker_tls == "off":
            for field, host in workers:
                if not is_loopback(host):
                    raise ValueError(f"{field}: {host!r} is not loopback, which needs {_CURE.format('worker_tls: mutual')}")
        if self.door_files is None and not is_loopback(doors):
            raise ValueError(f"serving.host: {doors!r} is not loopback, which needs {_CURE.format('door_cert and door_key')}")


_CURE = "{} in the section security, or allow_plaintext: true there if something else protects it"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. A name other than localhost may resolve to anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _filled(path: str, name: str, site: str) -> Path:
    return Path(path.replace("{name}", name).replace("{site}", site))
