"""Who a process is, by its certificate: the names in certificates, and what sockets and gRPC need to prove and to check them.

A process is named ``<name>.<role>.pdd.internal`` in the DNS names of its certificate; one certificate may carry the names of all processes
of a site. Addresses are in no certificate: a peer may be reached through proxies, and what counts is which process it is.
"""

from __future__ import annotations

import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pddbridge.kv_handshake import HandshakeError

DOMAIN: Final = "pdd.internal"


def identity(name: str, role: str) -> str:
    """The DNS name by which the certificate of process ``name`` proves name and role."""
    return f"{name}.{role}.{DOMAIN}"


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. ``ca``: of every authority whose certificates are believed; ``cert``: of this process, with what lies between."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True)
class RpcTls:
    """What gRPC needs, in PEM. ``ca`` None: nobody's certificate is asked for (a front door)."""

    ca: bytes | None
    cert: bytes
    key: bytes

    @staticmethod
    def load(files: TlsFiles) -> RpcTls:
        """Raises ValueError naming the file that cannot be read or does not fit the others."""
        _context(files, ssl.PROTOCOL_TLS_SERVER)  # gRPC would find a mistake in them only at the first connection, and tell nobody
        return RpcTls(files.ca.read_bytes(), files.cert.read_bytes(), files.key.read_bytes())


@dataclass(frozen=True)
class LinkTls:
    """Both ends of a KV link of this process. ``peers``: the identity that each peer must prove, by its name; its owner may add to it."""

    client: ssl.SSLContext
    server: ssl.SSLContext
    peers: Mapping[str, str]

    @staticmethod
    def load(files: TlsFiles, peers: Mapping[str, str]) -> LinkTls:
        """Raises ValueError naming the file that cannot be read or does not fit the others."""
        return LinkTls(_context(files, ssl.PROTOCOL_TLS_CLIENT), _context(files, ssl.PROTOCOL_TLS_SERVER), peers)

    def why_not(self, name: str, proven: Collection[str]) -> str | None:
        """Why a peer that says it is ``name`` and proved the identities ``proven`` is not believed; None if it is."""
        return why_not(name, self.peers.get(name), proven)


def why_not(name: str, needed: str | None, proven: Collection[str]) -> str | None:
    """Why a process is not believed to be ``name``, for which a certificate for ``needed`` is asked; None if it is. ``needed`` None: there
    is no such peer."""
    if needed is None:
        return f"no peer is named {name!r}"
    return None if needed in proven else f"a certificate for {needed}"


def proven_names(sock: ssl.SSLSocket) -> frozenset[str]:
    """The DNS names in the checked certificate of the peer."""
    found = sock.getpeercert() or {}
    names = found.get("subjectAltName", ())
    assert isinstance(names, tuple)
    return frozenset(str(entry[1]) for entry in names if isinstance(entry, tuple) and entry[0] == "DNS")


def check_peer(tls: LinkTls, name: str, sock: ssl.SSLSocket, mine: str, we_receive: bool) -> None:
    """Raises HandshakeError naming both sides unless the peer at the other end of ``sock``, which says that it is ``name``, proved it."""
    proven = proven_names(sock)
    reason = tls.why_not(name, proven)
    if reason is None:
        return
    shown = f"a certificate for {sorted(proven)}"
    if we_receive:
        raise HandshakeError("certificate", name, shown, mine, f"needs: {reason}")
    raise HandshakeError("certificate", mine, f"needs: {reason}", name, shown)


def _context(files: TlsFiles, purpose: int) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # identities are no host names: check_peer compares them
    context.verify_mode = ssl.CERT_REQUIRED
    for what, path in (("ca", files.ca), ("cert", files.cert), ("key", files.key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise ValueError(f"security.{what}: cannot read {path}: {error.strerror}") from error
    try:
        context.load_verify_locations(files.ca)
        context.load_cert_chain(files.cert, files.key)
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"security: {files.ca}, {files.cert} and {files.key} are not PEM files that fit: {error}") from error
    return context
