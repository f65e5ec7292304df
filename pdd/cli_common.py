"""What all commands of `pdd` share: where things are kept, how a mistake ends, which console tables go to."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console

from pdd.user_yaml import mistakes

DEFAULT_CONFIG = Path("configs/local.yaml")
FIGURE_SUFFIXES = (".png", ".svg")
REPORT_SUFFIXES = (".html", ".png")
ConfigArgument = Annotated[Path, typer.Argument(help="launch config (YAML)")]


def cache_dir() -> Path:
    """Where models and compiled programs are kept: $PDD_CACHE, else ~/.cache/pdd."""
    return Path(os.environ.get("PDD_CACHE") or Path.home() / ".cache" / "pdd")


def api_key() -> str | None:
    """Of the endpoint that is asked: $PDD_API_KEY."""
    return os.environ.get("PDD_API_KEY") or None


def fail(message: object, status: int = 1) -> typer.Exit:
    """To be raised: one line on stderr, then this exit status."""
    if isinstance(message, ValidationError):
        message = "; ".join(mistakes(message))
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"pdd: {message}")
    return typer.Exit(status)


def writable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before minutes of work, not after."""
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            was_there = path.exists()
            path.open("a").close()
            if not was_there:
                path.unlink()
        except OSError as error:
            raise fail(f"{option.opts[0]}: given {str(path)!r}, which cannot be written: {error.strerror}", 2) from error
    return path


def drawable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """As ``writable``, for a figure."""
    return _writable_as(FIGURE_SUFFIXES, option, path)


def reportable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """As ``writable``, for a page or a picture."""
    return _writable_as(REPORT_SUFFIXES, option, path)


def _writable_as(suffixes: tuple[str, ...], option: typer.CallbackParam, path: Path | None) -> Path | None:
    if path is not None and path.suffix.lower() not in suffixes:
        raise fail(f"{option.opts[0]}: given {str(path)!r}, allowed a name that ends in {' or '.join(suffixes)}", 2)
    return writable(option, path)


def above_zero(option: typer.CallbackParam, value: float | None) -> float | None:
    """Refuse what is no finite number above 0."""
    if value is not None and not 0 < value < math.inf:
        raise fail(f"{option.opts[0]}: given {value:g}, allowed above 0", 2)
    return value


def wide_console() -> Console:
    """Where nobody reads along (a file, a pipe) tables need not fit into 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)
