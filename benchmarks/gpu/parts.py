"""The parts of a run: what each needs, how long it may take, and the code behind it, imported only where it runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.gpu.findings import Finding
from benchmarks.gpu.sizes import Sizes
from pddkernels.shapes import MODEL_SHAPES

if TYPE_CHECKING:
    import torch

_KERNELS: Final = ("numpy", "torch")
# What the engines and the frames of KV import; the last two have stand-ins.
_BRIDGE: Final = ("numpy", "ml_dtypes", "safetensors", "crc32c", "zstandard")


@dataclass(frozen=True)
class Setting:
    """What every part is told. ``device``: "cuda" or "cpu"."""

    device: str
    sizes: Sizes
    seed: int
    threads: int

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.device)


@dataclass(frozen=True)
class Part:
    """``needs``: packages without which it is skipped · ``alone``: nothing else may run on the device meanwhile, as it measures ·
    ``timeout_s`` on a GPU.
    """

    name: str
    needs: tuple[str, ...]
    alone: bool
    timeout_s: float
    run: Callable[[Setting], list[Finding]]


def _limits(setting: Setting) -> list[Finding]:
    from benchmarks.gpu import limits

    return limits.run(setting.torch_device, setting.sizes)


def _attention(model: str) -> Callable[[Setting], list[Finding]]:
    def run(setting: Setting) -> list[Finding]:
        from benchmarks.gpu import check_attention

        return check_attention.run(model, setting.torch_device, setting.sizes, setting.seed)

    return run


def _latent(setting: Setting) -> list[Finding]:
    from benchmarks.gpu import check_latent

    return check_latent.run(setting.torch_device, setting.sizes, setting.seed)


def _pages(setting: Setting) -> list[Finding]:
    from benchmarks.gpu import check_pages

    return check_pages.run(setting.torch_device, setting.sizes, setting.seed)


def _speed(setting: Setting) -> list[Finding]:
    from benchmarks.gpu import speed

    return speed.run(speed.MODELS, setting.torch_device, setting.sizes, setting.seed)


def _torch_engine(setting: Setting) -> list[Finding]:
    from benchmarks.gpu import models

    models.set_environment({"torch": setting.device}, setting.threads)
    from benchmarks.gpu import engine_speed

    return engine_speed.run("torch", setting.device, setting.torch_device, setting.sizes, setting.threads, setting.seed)


def _graphed_decode(setting: Setting) -> list[Finding]:
    if setting.device != "cuda":
        return [Finding("decode graphs", "skipped", f"a {setting.device} replays no recorded steps")]
    from benchmarks.gpu import models

    models.set_environment({"torch": setting.device}, setting.threads)
    from benchmarks.gpu import graphed_decode

    return graphed_decode.run(setting.device, setting.torch_device, setting.sizes, setting.threads, setting.seed)


def _jax_engine(setting: Setting) -> list[Finding]:
    from benchmarks.gpu import models

    models.set_environment({"jax": setting.device}, setting.threads)
    jax = importlib.import_module("jax")
    try:
        jax.devices(setting.device)
    except RuntimeError as error:
        return [Finding("engine", "skipped", f"this jax knows no {setting.device} device: {' '.join(str(error).split())[:120]}")]
    from benchmarks.gpu import engine_speed

    return engine_speed.run("jax", setting.device, setting.torch_device, setting.sizes, setting.threads, setting.seed)


def _handoff(sender: str) -> Callable[[Setting], list[Finding]]:
    def run(setting: Setting) -> list[Finding]:
        from benchmarks.gpu import models

        engine: models.EngineName = "jax" if sender == "jax" else "torch"
        models.set_environment({engine: "cpu", "torch": setting.device}, setting.threads)
        from benchmarks.gpu import handoff

        places = handoff.Place(engine, "cpu", 12), handoff.Place("torch", setting.device, 16)
        return handoff.run(*places, setting.sizes, setting.threads, setting.seed)

    return run


PARTS: Final[dict[str, Part]] = {
    part.name: part
    for part in (
        *(Part(f"attention of {model}", _KERNELS, False, 240, _attention(model)) for model in MODEL_SHAPES),
        Part("latent attention", _KERNELS, False, 240, _latent),
        Part("page moves", _KERNELS, False, 180, _pages),
        Part("handoff jax to torch", (*_BRIDGE, "torch", "jax", "flax"), False, 180, _handoff("jax")),
        Part("handoff torch to torch", (*_BRIDGE, "torch"), False, 180, _handoff("torch")),
        Part("limits", _KERNELS, True, 60, _limits),
        Part("torch engine", (*_BRIDGE, "torch"), True, 150, _torch_engine),
        Part("decode graphs", (*_BRIDGE, "torch", "triton"), True, 120, _graphed_decode),
        Part("kernel speed", _KERNELS, True, 120, _speed),
        Part("jax engine", (*_BRIDGE, "torch", "jax", "flax"), True, 400, _jax_engine),
    )
}
