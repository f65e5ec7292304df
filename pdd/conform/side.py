"""One side of a comparison: an engine on a device, and how to open it. Engines are loaded by name, as a worker does."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from pddbridge.engine import Engine, EngineConfig, EngineFactory

EngineName = Literal["jax", "torch"]
SideName = Literal["a", "b"]
Dtype = Literal["float32", "bfloat16"]

# How jax calls the platforms that it shall start; everything else of a machine stays untouched.
_JAX_PLATFORMS: Final = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "rocm": "rocm", "tpu": "tpu"}


@dataclass(frozen=True)
class Side:
    """``engine`` on ``device``: "cpu", "cuda", "cuda:1", "tpu" and whatever else the engine takes."""

    name: SideName
    engine: EngineName
    device: str
    model_dir: Path
    page_size: int

    @property
    def label(self) -> str:
        return f"{self.engine}:{self.device}"

    @property
    def platform(self) -> str:
        """The device without its number."""
        return self.device.partition(":")[0]

    @property
    def replays(self) -> bool:
        """Whether a worker would replay recorded decode steps there (``decode_graphs: auto``)."""
        return self.engine == "torch" and self.platform == "cuda"


@dataclass(frozen=True)
class Sizes:
    """Room that the levels need in an engine: tokens of a row, rows in a step, tokens in a step."""

    context_tokens: int
    rows: int
    step_tokens: int


def parse_side(name: SideName, text: str, model_dir: Path, page_size: int) -> Side:
    """``text``: engine:device, as in "jax:cpu". Raises ValueError naming the option."""
    engine, _, device = text.partition(":")
    if engine not in get_args(EngineName) or not device:
        raise ValueError(f"--{name}: given {text!r}, allowed ENGINE:DEVICE with an engine of {list(get_args(EngineName))}, as in jax:cpu")
    return Side(name, "jax" if engine == "jax" else "torch", device, model_dir, page_size)


def prepare_environment(sides: Sequence[Side], threads: int) -> None:
    """Set what frameworks read from the environment when they are first imported; call it before any engine is opened.

    jax starts only the platforms that are named, and takes memory as it needs it, not most of the device at once: both sides may be on one
    GPU. What the user set stands.
    """
    wanted = {"TQDM_DISABLE": "1"}  # the oracle's loading bar would tear our lines apart
    platforms = [_JAX_PLATFORMS.get(side.platform, side.platform) for side in sides if side.engine == "jax"]
    if platforms:
        wanted |= {"JAX_PLATFORMS": ",".join(dict.fromkeys([*platforms, "cpu"])), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for side in sides:
        # What one side alone would ask of JAX_PLATFORMS might shut the other's out.
        wanted = importlib.import_module(f"pdd{side.engine}.threads").environment(threads, side.platform) | wanted
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def open_engine(side: Side, dtype: Dtype, sizes: Sizes, threads: int, compile_cache_dir: Path | None) -> Engine:
    """Load the side's model with ``dtype`` for compute and KV, and record its decode steps where workers do. Raises ValueError as the
    engine does.
    """
    config = EngineConfig(
        device=side.device,
        compute_dtype=dtype,
        kv_dtype=dtype,
        page_size=side.page_size,
        num_pages=-(-sizes.context_tokens // side.page_size) * (sizes.rows + 1),
        max_context_tokens=sizes.context_tokens,
        max_step_tokens=sizes.step_tokens,
        max_rows=sizes.rows,
        num_threads=threads,
        compile_cache_dir=None if compile_cache_dir is None else str(compile_cache_dir / side.engine),
        decode_graphs=side.replays,
    )
    create: EngineFactory = importlib.import_module(f"pdd{side.engine}.engine").create
    engine = create(str(side.model_dir), config)
    if config.decode_graphs:
        engine.warm_up(lambda done, total, what: None)
    return engine
