"""`pdd conform` behind its options: what the user typed becomes sides and a plan, the ladder runs, the report is shown and saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from rich.console import Console

from pdd.conform.ladder import run
from pdd.conform.plan import Plan
from pdd.conform.prompts import PromptKind
from pdd.conform.report import LEVELS, save, show
from pdd.conform.side import Dtype, parse_side, prepare_environment
from pdd.launch.serve import end_on_signal
from pdd.models import resolve

_PROMPTS: Final[dict[str, PromptKind]] = {kind: kind for kind in get_args(PromptKind)}
_DTYPES: Final[dict[str, tuple[Dtype, ...]]] = {**{dtype: (dtype,) for dtype in get_args(Dtype)}, "both": get_args(Dtype)}


@dataclass(frozen=True)
class Request:
    """The options as given."""

    a: str
    b: str
    model: str
    model_b: str | None
    dtype: str
    levels: str
    seed: int
    prompt: str
    prompt_tokens: int
    threads: int
    page_sizes: tuple[int, int]
    json_file: Path | None


def conform_status(request: Request, cache_dir: Path, console: Console) -> int:
    """0 when every level holds, 1 when one does not. Raises ValueError, one line, for a mistake in the request or a model that does not
    open, OSError when the report cannot be written.
    """
    if request.dtype not in _DTYPES:
        raise ValueError(f"--dtype: given {request.dtype!r}, allowed {list(_DTYPES)}")
    levels = tuple(request.levels.split(","))
    if not set(levels) <= set(LEVELS):
        raise ValueError(f"--levels: given {request.levels!r}, allowed some of {','.join(LEVELS)}")
    if request.prompt not in _PROMPTS:
        raise ValueError(f"--prompt: given {request.prompt!r}, allowed {list(_PROMPTS)}")
    plan = Plan(
        levels,
        _DTYPES[request.dtype],
        request.seed,
        prompt=_PROMPTS[request.prompt],
        prompt_tokens=request.prompt_tokens,
        threads=request.threads,
    )
    dirs = [resolve(model, cache_dir) for model in (request.model, request.model_b or request.model)]
    a = parse_side("a", request.a, dirs[0], request.page_sizes[0])
    b = parse_side("b", request.b, dirs[1], request.page_sizes[1])
    end_on_signal()
    prepare_environment((a, b), plan.threads)
    status = console.status("") if console.is_terminal else None
    if status is None:
        report = run((a, b), plan, cache_dir, lambda line: console.print(line, soft_wrap=True))
    else:
        with status:
            report = run((a, b), plan, cache_dir, status.update)
    show(report, console)
    if request.json_file is not None:
        save(report, request.json_file)
    return 0 if report.passed else 1
