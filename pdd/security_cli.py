"""`pdd certs` and `pdd keys`: what a config's section ``security`` names, made in one command each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdd.cli_common import DEFAULT_CONFIG, ConfigArgument, fail
from pdd.config import load


def certs(
    config: ConfigArgument = DEFAULT_CONFIG,
    out: Annotated[Path, typer.Option("--out", help="directory for ca.pem, ca.key and a pair of files per process")] = Path("certs"),
    days: Annotated[int, typer.Option(min=1, max=3650, help="how long the certificates of processes are good")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="issue again what is there, by the same authority")] = False,
    door_host: Annotated[list[str] | None, typer.Option("--door-host", help="name or address by which clients reach the doors")] = None,
) -> None:
    """Make a certificate authority and a certificate for every process of CONFIG, for the config's section security."""
    from pdd.certs import DOOR_HOSTS, issue_all

    try:
        written = issue_all(load(config), out, days, renew, door_host or DOOR_HOSTS)
    except (ValueError, OSError) as error:
        raise fail(error) from error
    for path in written:
        print(path)
    print("\n# in the config:\nsecurity:\n  worker_tls: mutual")
    print(f"  ca: {out}/ca.pem\n  cert: {out}/{{name}}.pem\n  key: {out}/{{name}}.key")
    print(f"  door_cert: {out}/door.pem\n  door_key: {out}/door.key")
    print(f"# {out}/ca.key signs whatever it is asked to: keep it off the machines that serve")


def keys(
    tenant: Annotated[str, typer.Argument(help="whose key: lower-case letters, digits, hyphens")],
    file: Annotated[Path, typer.Option("--file", help="the config's security.api_keys; made if it is not there")] = Path("api_keys.yaml"),
) -> None:
    """Make an API key for TENANT, print it once and put its hash into the file, which running doors read again."""
    from pdd.serving.accounts import add_key

    try:
        print(add_key(file, tenant))
    except (ValueError, OSError) as error:
        raise fail(error) from error


def mount(app: typer.Typer) -> None:
    app.command()(certs)
    app.command()(keys)
