"""The options of `pdd chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdd.cli_common import cache_dir, fail, wide_console, writable


def chaos(
    seeds: Annotated[int, typer.Option(min=1, help="how many runs, each with a seed of its own")] = 5,
    first_seed: Annotated[int, typer.Option(help="the first of these seeds")] = 0,
    seed: Annotated[int | None, typer.Option(help="this one alone: the same requests and faults again")] = None,
    num_requests: Annotated[int, typer.Option("--requests", min=1, help="requests per seed")] = 20,
    shapes: Annotated[
        str, typer.Option(help="deployments in turn: lean, tight (tiny page pools), wide (two of each role)")
    ] = "lean,tight,wide",
    engines: Annotated[str, typer.Option(help="of prefill, relay and main: jax or torch")] = "torch,torch,torch",
    plan_only: Annotated[bool, typer.Option("--plan", help="print requests and faults, run nothing")] = False,
    table: Annotated[bool, typer.Option("--table", help="instead: kill every part in every state of a request's life")] = False,
    logs: Annotated[Path | None, typer.Option(help="keep the logs of all processes in this folder")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", callback=writable, help="write the report here")] = None,
) -> None:
    """Traffic and faults drawn from seeds, on real processes: whether every request ends once, with the tokens that it should have, and
    nothing is left behind. Exit status 1 when not, 2 for wrong options."""
    from pdd.chaos.command import Request, chaos_status
    from pdd.chaos.watch import NotInTimeError
    from pdd.launch.local import StartError
    from pdd.launch.serve import end_on_signal

    end_on_signal()
    request = Request(seeds, first_seed, seed, num_requests, shapes, engines, json_file, logs, plan_only, table)
    try:
        raise typer.Exit(chaos_status(request, cache_dir(), wide_console()))
    except (StartError, NotInTimeError) as error:
        raise fail(error) from error
    except (ValueError, OSError) as error:
        raise fail(error, 2) from error
