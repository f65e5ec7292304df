"""`pdd workers`: which workers a running deployment has, more of them, fewer. Talks to the launcher (`pdd serve`) that started it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.table import Table

from pdd.cli_common import fail
from pdd.config import load
from pddbridge.rpc.gen import registry_pb2, registry_pb2_grpc

workers = typer.Typer(no_args_is_help=True, help="Workers of a running deployment.")
# Workers load models, and draining ones finish what they hold.
_TIMEOUT_S = 900.0
Where = Annotated[str, typer.Option("--admin", help="address that `pdd serve` printed, or a launch config with survival.admin_port")]
Stub = registry_pb2_grpc.FleetStub


@workers.command("list")
def list_workers(admin: Where) -> None:
    """Every worker: what it is for, its state and why, requests that it holds, its lease."""
    _ask(admin, lambda stub: stub.List(registry_pb2.ListRequest(), timeout=_TIMEOUT_S))


@workers.command()
def add(
    admin: Where, role: Annotated[str, typer.Argument(help="prefill, relay or main")], count: Annotated[int, typer.Argument(min=1)] = 1
) -> None:
    """More workers, like the first one of that role. Returns when they serve."""
    _ask(admin, lambda stub: stub.Add(registry_pb2.AddRequest(role=role, count=count), timeout=_TIMEOUT_S))


@workers.command()
def drain(admin: Where, names: Annotated[list[str], typer.Argument(help="names of workers")]) -> None:
    """Take workers out: nothing new for them, what they hold ends or is moved after a time. Returns when they have ended."""
    _ask(admin, lambda stub: stub.Drain(registry_pb2.DrainRequest(names=names), timeout=_TIMEOUT_S))


@workers.command()
def scale(
    admin: Where, role: Annotated[str, typer.Argument(help="prefill, relay or main")], count: Annotated[int, typer.Argument(min=0)]
) -> None:
    """Add or drain workers of a role until there are that many."""
    _ask(admin, lambda stub: stub.Scale(registry_pb2.ScaleRequest(role=role, count=count), timeout=_TIMEOUT_S))


def _ask(admin: str, question: Callable[[Stub], registry_pb2.ListReply]) -> None:
    try:
        with grpc.insecure_channel(_address(admin)) as channel:
            reply = question(registry_pb2_grpc.FleetStub(channel))
    except ValueError as error:
        raise fail(error) from error
    except grpc.RpcError as error:
        said = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
        raise fail(said) from error
    console = Console(highlight=False)
    table = Table()
    for column in ("worker", "role", "site", "state", "holds", "failures", "lease", "why"):
        table.add_column(column)
    for worker in reply.workers:
        lease = f"{worker.lease_left_s:.0f} s" if worker.HasField("lease_left_s") else "-"
        table.add_row(worker.name, worker.role, worker.site, worker.state, str(worker.num_held), str(worker.failures), lease, worker.reason)
    console.print(table)


def _address(admin: str) -> str:
    """Raises ValueError."""
    if Path(admin).is_file():
        survival = load(Path(admin)).survival
        if survival.admin_port is None:
            raise ValueError(f"--admin: {admin} has no survival.admin_port; `pdd serve` prints the address it took")
        return f"{survival.admin_host}:{survival.admin_port}"
    return admin
