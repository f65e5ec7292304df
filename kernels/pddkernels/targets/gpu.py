"""Triton kernels compiled for GPUs that are not here.

The launchers are the ones that run: they are called on tensors without memory (device "meta"), and what they would launch, specialised
as it would be (constants, alignment), is caught by Triton's own hook before it compiles. So what is compiled here is what runs there.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource, CompiledKernel

from pddkernels.kv_pages.triton import append, pack_tokens, unpack_tokens
from pddkernels.mla_decode.triton import mla_attention
from pddkernels.mla_decode.triton_plan import LatentShape, plan_mla, tile_for
from pddkernels.ragged_paged_attention.options import AttentionOptions
from pddkernels.ragged_paged_attention.triton import ragged_paged_attention
from pddkernels.ragged_paged_attention.triton_plan import plan
from pddkernels.ragged_paged_attention.triton_tiles import GFX942, SM80, SM90, Geometry, Gpu, tiles_for
from pddkernels.shapes import MLA_SHAPES, MODEL_SHAPES, MLAShape, ModelShape
from pddkernels.targets.cases import DECODE, NUM_PAGES, PAGE_SIZE, PHASES, PREFILL, Phase
from pddkernels.targets.hardware import Target
from pddkernels.targets.report import Case, Compiled, Registers
from pddkernels.targets.work import Work, attention, copy, latent_attention

_DEVICES: Final[dict[str, tuple[GPUTarget, Gpu]]] = {
    "cuda-sm80": (GPUTarget("cuda", 80, 32), SM80),
    "cuda-sm90": (GPUTarget("cuda", 90, 32), SM90),
    "hip-gfx942": (GPUTarget("hip", "gfx942", 64), GFX942),
}
_OPTIONS: Final = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
_SMALL_MODEL: Final = "llama-3.1-8b"
_META: Final = torch.device("meta")
# Tensor-core instructions: mma.sync, wgmma (SASS), mfma (AMD). Loads and copies of 16 bytes a thread.
_TELLING: Final[dict[str, str]] = {
    "tensor_core": r"\b(?:HMMA|HGMMA)\.|\bv_mfma_",
    "loads_16_bytes": r"\bLDG\.E\.(?:[A-Z]+\.)*128|\bLDGSTS\.(?:[A-Z]+\.)*128|\bUTMALDG|\bglobal_load_dwordx4|\bbuffer_load_dwordx4",
}


@dataclass(frozen=True)
class Launch:
    """One kernel as it would be launched: what ``triton.compile`` needs."""

    source: ASTSource
    options: dict[str, object]

    @property
    def name(self) -> str:
        return str(self.source.fn.__name__)


class _NoDevice(DriverBase):
    """Answers what Triton asks before it compiles, for a target without a device."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return _META

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Callable[..., float]:
        raise RuntimeError("nothing can be measured without a device")


@contextmanager
def launches_caught(target: GPUTarget) -> Iterator[list[Launch]]:
    """Launches inside the block are listed instead of compiled and run; one entry per specialisation and process.

    The process is then without a device for good, and every kernel keeps the target it met first: one target per process.
    """
    caught: list[Launch] = []

    def catch(*, key: object, fn: object, compile: dict[str, object], **_: object) -> bool:
        given = json.loads(str(compile["specialization_data"]))["options"]
        options = {name: value for name, value in given.items() if name in _OPTIONS}
        configs = compile["configs"]
        assert isinstance(configs, list)
        caught.append(Launch(ASTSource(fn.jit_function, compile["signature"], compile["constants"], configs[0]), options))  # type: ignore[attr-defined]
        return True

    triton.runtime.driver.set_active(_NoDevice(target))
    triton.knobs.runtime.jit_cache_hook = catch
    try:
        yield caught
    finally:
        triton.knobs.runtime.jit_cache_hook = None


def cases(target: Target, small: bool) -> list[Case]:
    """Every kernel at every shape; with ``small`` each kernel at one. Named by operation, kernel, model and phase."""
    device, gpu = _DEVICES[target.name]
    found: list[Case] = []
    models = {_SMALL_MODEL: MODEL_SHAPES[_SMALL_MODEL]} if small else MODEL_SHAPES
    calls = [(model, _calls(shape, gpu)) for model, shape in models.items()]
    calls += [] if small else [(model, _latent_calls(latent_shape, gpu)) for model, latent_shape in MLA_SHAPES.items()]
    seen: set[str] = set()
    for model, calls_of_model in calls:
        for operation, what, work, call in calls_of_model:
            with launches_caught(device) as launches:
                call()
            for launch in launches:
                if (key := _identity(launch)) not in seen:  # the same code as another model's or phase's
                    seen.add(key)
                    name = f"{operation}/{launch.name}{_tile(launch)}: {model}, {what}"
                    found.append(Case("kernel", name, partial(_compile, launch, device, work)))
    return found


_Call = tuple[str, str, Work, Callable[[], object]]


def _calls(shape: ModelShape, gpu: Gpu) -> Iterator[_Call]:
    """(operation, at what, its work, a call of it on tensors without memory) for everything that a model of ``shape`` runs."""
    for window in dict.fromkeys(shape.windows):
        for phase in PHASES:
            seen = "" if window is None else f", window {window}"
            work = attention(phase.rows, shape.num_heads, shape.num_kv_heads, shape.head_dim, window)
            yield "ragged_paged_attention", phase.name + seen, work, partial(_attend, shape, phase, window, gpu)
    tokens = PREFILL.num_tokens
    work = copy(2 * tokens * shape.num_kv_heads * shape.head_dim)
    yield "kv_pages.append", f"{tokens} tokens", work, partial(_append, shape, tokens)
    yield "kv_pages.pack", f"{tokens} tokens", work * (shape.num_layers / 2), partial(_pack, shape, tokens)
    yield "kv_pages.unpack", f"{tokens} tokens", work * (shape.num_layers / 2), partial(_unpack, shape, tokens)


def _latent_calls(shape: MLAShape, gpu: Gpu) -> Iterator[_Call]:
    work = latent_attention(DECODE.rows, shape.num_heads, shape.latent_dim, shape.rope_dim)
    yield "mla_decode", DECODE.name, work, partial(_attend_latents, shape, DECODE, gpu)


def _attend_latents(shape: MLAShape, phase: Phase, gpu: Gpu) -> None:
    latent_shape = LatentShape(shape.num_heads, shape.latent_dim, shape.rope_dim, PAGE_SIZE, itemsize=2)
    planned = plan_mla(
        np.cumsum([0, *(new for _, new in phase.rows)], dtype=np.int32),
        np.array([context_len for context_len, _ in phase.rows], np.int32),
        np.zeros((len(phase.rows), -(-phase.max_context_tokens // PAGE_SIZE)), np.int32),
        shape=latent_shape,
        tile=tile_for(latent_shape, gpu),
        num_processors=gpu.num_processors,
        device=_META,
    )
    q_latent, q_rope = (_tensor(phase.num_tokens, shape.num_heads, dim) for dim in (shape.latent_dim, shape.rope_dim))
    latent_pages, rope_pages = (_tensor(NUM_PAGES, PAGE_SIZE, dim) for dim in (shape.latent_dim, shape.rope_dim))
    mla_attention(q_latent, q_rope, latent_pages, rope_pages, planned, shape.scale)


def _attend(shape: ModelShape, phase: Phase, window: int | None, gpu: Gpu) -> None:
    geometry = Geometry(shape.num_heads, shape.num_kv_heads, shape.head_dim, PAGE_SIZE, itemsize=2)
    contexts = np.array([context_len for context_len, _ in phase.rows], np.int32)
    row_starts = np.cumsum([0, *(new for _, new in phase.rows)], dtype=np.int32)
    tables = np.zeros((len(phase.rows), -(-phase.max_context_tokens // PAGE_SIZE)), np.int32)
    planned = plan(
        row_starts,
        contexts,
        tables,
        geometry=geometry,
        tiles=tiles_for(geometry, gpu),
        windows=(window,),
        num_processors=gpu.num_processors,
        device=_META,
    )
    queries = _tensor(phase.num_tokens, shape.num_heads, shape.head_dim)
    sinks = torch.empty(shape.num_heads, dtype=torch.float32, device=_META) if shape.sinks else None
    options = AttentionOptions(shape.head_dim**-0.5, window, shape.soft_cap)
    ragged_paged_attention(queries, _pages(shape), _pages(shape), planned, options, sinks)


def _append(shape: ModelShape, num_tokens: int) -> None:
    new = _tensor(num_tokens, shape.num_kv_heads, shape.head_dim)
    append(_pages(shape), _pages(shape), new, new, _integers(num_tokens), _integers(1))


def _pack(shape: ModelShape, num_tokens: int) -> None:
    pack_tokens(_layers(shape), _integers(num_tokens // PAGE_SIZE), 0, num_tokens, 0, shape.num_kv_heads)


def _unpack(shape: ModelShape, num_tokens: int) -> None:
    values = _tensor(shape.num_layers, num_tokens, shape.num_kv_heads, shape.head_dim)
    unpack_tokens(_layers(shape), values, _integers(num_tokens // PAGE_SIZE), 0, 0)


def _tensor(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16, device=_META)


def _integers(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32, device=_META)


def _pages(shape: ModelShape) -> torch.Tensor:
    return _tensor(NUM_PAGES, shape.num_kv_heads, PAGE_SIZE, shape.head_dim)


def _layers(shape: ModelShape) -> torch.Tensor:
    return _tensor(shape.num_layers, NUM_PAGES, shape.num_kv_heads, PAGE_SIZE, shape.head_dim)


def _identity(launch: Launch) -> str:
    return f"{launch.name} {launch.source.hash()} {sorted(launch.options.items())}"


def _tile(launch: Launch) -> str:
    constants = {launch.source.fn.arg_names[path[0]]: value for path, value in launch.source.constants.items()}
    sizes = [str(constants[name]) for name in ("ROWS", "KEYS") if name in constants]
    return f" {'x'.join(sizes)}" if sizes else ""


def _compile(launch: Launch, device: GPUTarget, work: Work) -> Compiled:
    return _facts(triton.compile(launch.source, target=device, options=launch.options), device, work)


def _facts(kernel: CompiledKernel, device: GPUTarget, work: Work) -> Compiled:
    if device.backend == "cuda":
        text, registers = _cuda_facts(kernel)
    else:
        text, registers = _amd_facts(kernel)
    instructions = {name: len(re.findall(pattern, text)) for name, pattern in _TELLING.items()}
    return Compiled(work, registers=registers, instructions=instructions)


def _cuda_facts(kernel: CompiledKernel) -> tuple[str, Registers]:
    """(SASS, registers) from the cubin, by the tools that come with Triton."""
    tool = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage.stdout + usage.stderr)}
    return sass, Registers(found["REG"], found["STACK"] + found["LOCAL"], int(kernel.metadata.shared))


def _amd_facts(kernel: CompiledKernel) -> tuple[str, Registers]:
    """(assembly, registers) from the notes that LLVM writes with it; a spilled register is 4 bytes of each thread."""
    text = str(kernel.asm["amdgcn"])
    notes = {name: int(value) for name, value in re.findall(r"\.((?:vgpr|agpr)_count|vgpr_spill_count):\s+(\d+)", text)}
    return text, Registers(notes["vgpr_count"], 4 * notes["vgpr_spill_count"], int(kernel.metadata.shared))
