"""Certificates for tests: one authority per test process, and what its holders need."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pdd.certs import Pair, issue, make_authority, write_pair
from pddbridge.tls import LinkTls, RpcTls, TlsFiles, identity

PEERS: Mapping[str, str] = {name: identity(name, name.split("-")[0]) for name in ("prefill-1", "relay-1", "main-1")}


@functools.cache
def authority(which: str = "ours") -> Pair:
    return make_authority(which)


@functools.cache
def files(*names: str, signed_by: str = "ours", believes: str = "ours") -> TlsFiles:
    """Of a process whose certificate is for ``names`` and by authority ``signed_by``, and that believes ``believes``."""
    directory = Path(_directory().name) / f"{signed_by}-{believes}-{'-'.join(names)}"
    directory.mkdir()
    write_pair(directory, "leaf", issue(authority(signed_by), names[0], names))
    write_pair(directory, "ca", authority(believes))
    return TlsFiles(directory / "ca.pem", directory / "leaf.pem", directory / "leaf.key")


def link_tls(name: str, *, signed_by: str = "ours", believes: str = "ours", peers: Mapping[str, str] = PEERS) -> LinkTls:
    """Of a process with a certificate for the ``name`` of a worker; its role is what stands before the hyphen."""
    return LinkTls.load(files(identity(name, name.split("-")[0]), signed_by=signed_by, believes=believes), peers)


def rpc_tls(name: str, role: str, *, signed_by: str = "ours", believes: str = "ours") -> RpcTls:
    return RpcTls.load(files(identity(name, role), signed_by=signed_by, believes=believes))


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pdd-test-certs-")
