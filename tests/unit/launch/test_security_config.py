"""What may not be started in the open, where certificates are looked for, and what `pdd certs` makes."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from pdd.certs import issue_all
from pdd.cli import app
from pdd.config import LaunchConfig, load
from pdd.security_config import SecurityConfig, is_loopback
from pdd.tls_setup import coordinator_rpc_tls, door_tls, worker_link_tls, worker_rpc_tls
from pddbridge.tls import identity

EXAMPLE = Path("configs/local-secure.yaml")
FILES = {"ca": "ca.pem", "cert": "{site}/{name}.pem", "key": "{name}.key"}


def config(host: str = "127.0.0.1", door: str = "127.0.0.1", local_link: str = "auto", **security: object) -> LaunchConfig:
    raw = load(EXAMPLE).model_dump(mode="json")
    raw["workers"][2]["host"] = host
    raw["serving"]["host"] = door
    return LaunchConfig.model_validate({**raw, "local_link": local_link, "security": security})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "main.example.org"])
def test_plaintext_is_for_loopback_unless_said_otherwise(host: str) -> None:
    with pytest.raises(ValueError, match=r"workers\.main-0\.host: .* is not loopback, which needs worker_tls: mutual"):
        config(host=host)
    with pytest.raises(ValueError, match=r"serving\.host: .* is not loopback, which needs door_cert and door_key"):
        config(door=host)
    with pytest.raises(ValueError, match=r"serving\.host"):  # workers' certificates are not the doors'
        config(door=host, worker_tls="mutual", **FILES)
    with pytest.raises(ValueError, match=r"workers\.main-0\.host"):
        config(host=host, door_cert="d.pem", door_key="d.key")
    config(host=host, worker_tls="mutual", **FILES)
    config(door=host, door_cert="d.pem", door_key="d.key")
    config(host=host, door=host, allow_plaintext=True)


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("security", "told"),
    [
        ({"worker_tls": "mutual", "ca": "a", "cert": "b"}, "key: not given"),
        ({"door_cert": "a"}, "door_cert, door_key"),
        ({"worker_tls": "on"}, "worker_tls"),
        ({"tls": "mutual"}, "tls"),
        ({"max_connections": 0}, "max_connections"),
    ],
)
def test_a_half_section_is_refused(security: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SecurityConfig.model_validate(security)


def test_nixl_is_not_encrypted_so_it_must_be_allowed() -> None:
    with pytest.raises(ValueError, match="nixl"):
        config(local_link="nixl", worker_tls="mutual", **FILES)
    assert not config(worker_tls="mutual", **FILES).security.allows_nixl()
    assert config(local_link="nixl", worker_tls="mutual", allow_plaintext=True, **FILES).security.allows_nixl()
    assert config(local_link="nixl").security.allows_nixl()


def test_names_and_sites_are_filled_in() -> None:
    files = SecurityConfig.model_validate({"worker_tls": "mutual", **FILES}).worker_files("main-0", "b")
    assert files is not None
    assert (str(files.cert), str(files.key)) == ("b/main-0.pem", "main-0.key")
    assert SecurityConfig.model_validate(FILES).worker_files("main-0", "b") is None


def test_two_commands_make_what_the_example_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = EXAMPLE.resolve()
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(app, ["certs", str(example), "--out", "certs"])
    assert made.exit_code == 0, made.output
    key = CliRunner().invoke(app, ["keys", "alice"])
    assert key.exit_code == 0
    assert key.output.strip() not in Path("api_keys.yaml").read_text()
    launch = load(example)
    for worker in launch.workers:
        assert worker_rpc_tls(launch, worker) is not None
        assert worker_link_tls(launch, worker, {}) is not None
    assert coordinator_rpc_tls(launch) is not None
    door = door_tls(launch.security)
    assert door is not None
    assert door.ca is None
    for file in Path("certs").glob("*.key"):
        assert file.stat().st_mode & 0o077 == 0, file


def test_certificates_say_who_and_how_long_and_are_renewed_by_the_same_authority(tmp_path: Path) -> None:
    launch = load(EXAMPLE)
    issue_all(launch, tmp_path, days=30)
    ca = (tmp_path / "ca.pem").read_bytes()
    leaf = x509.load_pem_x509_certificate((tmp_path / "main-0.pem").read_bytes())
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    assert names == [identity("main-0", "main")] == ["main-0.main.pdd.internal"]
    assert (leaf.not_valid_after_utc - leaf.not_valid_before_utc).days == 30
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert issue_all(launch, tmp_path) == []
    before = (tmp_path / "main-0.pem").read_bytes()
    assert len(issue_all(launch, tmp_path, renew=True)) == 2 * 5
    assert (tmp_path / "ca.pem").read_bytes() == ca
    assert (tmp_path / "main-0.pem").read_bytes() != before
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "main-0.pem", tmp_path / "main-0.key")
    with pytest.raises(ssl.SSLError):  # a pair that does not fit
        context.load_cert_chain(tmp_path / "main-0.pem", tmp_path / "relay-0.key")


def test_files_that_are_missing_or_do_not_fit_are_named_at_start(tmp_path: Path) -> None:
    issue_all(load(EXAMPLE), tmp_path)
    files = {"ca": f"{tmp_path}/ca.pem", "cert": f"{tmp_path}/{{name}}.pem", "key": f"{tmp_path}/relay-0.key"}
    launch = config(worker_tls="mutual", **files)
    with pytest.raises(ValueError, match=r"main-0\.pem.*relay-0\.key.*fit"):
        worker_rpc_tls(launch, launch.workers[2])
    (tmp_path / "main-0.pem").unlink()
    with pytest.raises(ValueError, match=r"security\.cert: cannot read .*main-0\.pem"):
        worker_rpc_tls(launch, launch.workers[2])
