"""A certificate authority and one certificate per process of a launch config. P-256 keys; nothing is sent anywhere.

Run again, it keeps the authority that is there and issues what is missing or asked for: how certificates are renewed and workers added.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdd.config import LaunchConfig
from pdd.security_config import COORDINATOR
from pddbridge.tls import identity

CA_DAYS: Final = 3650
DOOR_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
_BACKDATED: Final = datetime.timedelta(minutes=5)  # clocks differ
# A certificate, and whoever holds its key.
Pair = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def issue_all(config: LaunchConfig, out: Path, days: int = 365, renew: bool = False, door_hosts: Sequence[str] = DOOR_HOSTS) -> list[Path]:
    """Files written. Raises ValueError for a broken or expired authority in ``out``, OSError."""
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    if (out / "ca.pem").exists():
        authority = _read(out / "ca.pem", out / "ca.key")
    else:
        authority = make_authority()
        written += write_pair(out, "ca", authority)
    wanted = {worker.name: [identity(worker.name, worker.role)] for worker in config.workers}
    wanted[COORDINATOR] = [identity(COORDINATOR, COORDINATOR)]
    wanted["door"] = list(door_hosts)
    for name, names in wanted.items():
        if renew or not (out / f"{name}.pem").exists():
            written += write_pair(out, name, issue(authority, name, names, days))
    return written


def make_authority(name: str = "pdd certificate authority", days: int = CA_DAYS) -> Pair:
    """An authority of its own, which may sign certificates of processes and no further authorities."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _named(name)
    builder = _begun(subject, subject, key, days).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return builder.sign(key, hashes.SHA256()), key


def issue(authority: Pair, name: str, hosts: Sequence[str], days: int = 365) -> Pair:
    """A certificate for both ends of a connection. ``hosts``: DNS names and addresses that it proves."""
    signer, signing_key = authority
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _begun(_named(name), signer.subject, key, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([_general(host) for host in hosts]), critical=False)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    public = signer.public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
    return builder.sign(signing_key, hashes.SHA256()), key


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write_pair(out: Path, name: str, pair: Pair) -> list[Path]:
    """``name``.pem and ``name``.key in ``out``, the key for its owner alone. Returns both."""
    certificate, key = pair
    cert_file, key_file = out / f"{name}.pem", out / f"{name}.key"
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    # Never readable by others, not even between creation and a chmod.
    key_file.unlink(missing_ok=True)
    with os.fdopen(os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return [cert_file, key_file]


def _read(cert_file: Path, key_file: Path) -> Pair:
    certificate = x509.load_pem_x509_certificate(cert_file.read_bytes())
    key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{key_file}: an elliptic-curve key is expected")
    if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise ValueError(f"{cert_file}: expired on {certificate.not_valid_after_utc:%Y-%m-%d}")
    return certificate, key
