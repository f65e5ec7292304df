"""The PyTorch engine: steps, sampling and KV access, by the contract of :mod:`pddbridge.engine`.

What is promised about numbers: a row's tokens depend on its own request alone, up to ties. With float32 compute, a row alone, in a
batch, stepwise or as one extend has the same logits within rounding (about 1e-5 of their size), not to the last bit, since matrix
products of different heights add in different orders; so its tokens are equal unless two candidates tie within that. With bfloat16
compute the same holds within bfloat16's rounding, and ties are correspondingly wider. "int8" is bfloat16 compute with the weights of
linear maps rounded to int8, a scale per output: another model, slightly, so it never compares with an exact one.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pddbridge.checkpoint import open_checkpoint
from pddbridge.checkpoint_source import ModelTensors
from pddbridge.choice import Choice
from pddbridge.engine import MAX_SCORED_TOKENS, EngineConfig, EngineStats, KVBlock, PendingKV, Step, StepResult, StepUnderWay
from pddbridge.engine_checks import COMPUTE_DTYPES, INT8, check_block, check_config, check_page, check_page_range, check_step
from pddbridge.kv_layout import KVLayout, head_major
from pddbridge.kv_spec import KVSpec, TokenRange
from pddbridge.model_spec import ModelSpec
from pddbridge.native.moves import native_moves
from pddkernels.native.build import NativeUnavailableError
from pddkernels.native.torch_native import Native
from pddkernels.torch_ops import Problem, choose
from pddtorch.arrays import TORCH_DTYPES
from pddtorch.batch import Batch, make_batch
from pddtorch.cuda_graphs import CudaRecorder, Recorder
from pddtorch.decode_graphs import DecodeGraphs
from pddtorch.draw import measured_error
from pddtorch.kv import KVPool
from pddtorch.model import LlamaModel
from pddtorch.outcome import TorchStep
from pddtorch.pointwise import NativePointwise, TorchPointwise
from pddtorch.warm_up import warm_up_shapes
from pddtorch.weights import load_weights

logger = logging.getLogger(__name__)


def create(model_dir: str, config: EngineConfig) -> TorchEngine:
    """Load ``model_dir`` onto ``config.device``. Sets torch's thread count for the process.

    Raises ValueError for a config that cannot be served (field named) and CheckpointError for a model that cannot be loaded.
    """
    return TorchEngine(open_checkpoint(model_dir), config)


class TorchEngine:
    """See :class:`pddbridge.engine.Engine`. All calls from one thread. ``checkpoint``: opened by :func:`create`, or weights that are in no
    file · ``recorder``: of decode steps, if the config wants them recorded; by default the device's.
    """

    @torch.inference_mode()
    def __init__(self, checkpoint: ModelTensors, config: EngineConfig, recorder: Recorder | None = None) -> None:
        check_config(config, checkpoint.spec, (*COMPUTE_DTYPES, INT8))
        if config.num_devices != 1:
            raise ValueError(f"num_devices: given {config.num_devices}, this engine uses 1")
        self._device = _device(config.device)
        if config.decode_graphs and recorder is None:
            recorder = _recorder(self._device)
        self._config = config
        self._spec = checkpoint.spec
        self._thread: int | None = None
        self._own_thread()
        int8 = config.compute_dtype == INT8
        dtype, kv_dtype = torch.bfloat16 if int8 else TORCH_DTYPES[config.compute_dtype], TORCH_DTYPES[config.kv_dtype]
        native, self._fallbacks = _open_native(self._device, config.compile_cache_dir)
        if int8 and (native is None or not native.has_int8):
            raise ValueError(
                "compute_dtype: int8 needs a CPU with AVX-512 BF16 and VBMI, and a C++ compiler, allowed here float32 or bfloat16"
            )
        weights = load_weights(checkpoint, dtype, self._device, native, int8=int8)
        self._weights_digest = checkpoint.weights_digest()
        pointwise = TorchPointwise(self._spec, dtype) if native is None else NativePointwise(self._spec, dtype, native)
        self._model = LlamaModel(self._spec, weights, dtype, self._device, pointwise)
        self._kv_spec = KVSpec.gqa(self._spec.num_layers, self._spec.num_kv_heads, self._spec.head_dim, config.kv_dtype)
        self._layout = head_major(config.page_size, config.kv_dtype)
        windows = tuple(dict.fromkeys(self._spec.layer_windows))
        heads = (self._spec.num_heads, self._spec.num_kv_heads, self._spec.head_dim)
        self._ops = choose(Problem(*heads, config.page_size, dtype, kv_dtype, windows), self._device, native)
        moves, missing = native_moves(config.compile_cache_dir) if self._device.type == "cpu" else (None, {})
        self._fallbacks |= missing
        self._pool = KVPool(self._kv_spec, config.num_pages, self._layout, self._ops, self._device, moves)
        self._graphs: DecodeGraphs | None = None
        if config.decode_graphs and recorder is not None:
            self._graphs = DecodeGraphs(self._ops, self._forward, self._device, recorder, config)
        self._num_steps = 0
        self._chosen: Counter[str] = Counter()
        self._draw_error = measured_error(self._device) if config.sample_on_device else 0.0
        # On a CPU every linear should be packed; where torch cannot, it shows here.
        self._fallbacks["unpacked_linear"] = weights.num_unpacked if self._device.type == "cpu" else 0

    @property
    def name(self) -> str:
        return "torch"

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def kv_spec(self) -> KVSpec:
        return self._kv_spec

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def weights_digest(self) -> str:
        return self._weights_digest

    def warm_up(self, progress: Callable[[int, int, str], None]) -> None:
        """Record what is to be recorded and run representative shapes, so that oneDNN's kernels exist and memory is touched. Writes to no
        page of the caller's.
        """
        self._own_thread()
        shapes = warm_up_shapes(self._config)
        num_graphs = 0 if self._graphs is None else len(self._graphs.sizes)
        total = num_graphs + len(shapes)
        if self._graphs is not None:
            for done, num_rows in enumerate(self._graphs.record_all(), start=1):
                progress(done, total, f"graph of decode, {num_rows} rows")
        for done, shape in enumerate(shapes, start=num_graphs + 1):
            self._logits(shape.step(self._pool.scratch_page))
            progress(done, total, shape.label)
        most_logits = min(self._config.max_step_tokens, self._config.max_rows + MAX_SCORED_TOKENS)
        self._model.warm_up(self._config.max_step_tokens, most_logits)

    def step(self, step: Step) -> StepResult:
        return self.start_step(step).result()

    @torch.inference_mode()
    def start_step(self, step: Step, after: StepUnderWay | None = None) -> TorchStep:
        """See :meth:`pddbridge.engine.RunsAhead.start_step`. A CPU has done the step on return."""
        check_step(step, self._config, self._spec.vocab_size, after)
        fed = None
        if after is not None:
            if not isinstance(after, TorchStep) or after.chosen is None or len(after.step.samples) != len(step.context_lens):
                raise ValueError("after: given another step than the one that was started last, or one with other rows")
            fed = after.chosen.ids
        logits = self._logits(step, fed)
        self._count(step)
        choice = Choice.of(step.samples, self._config.sample_on_device, self._spec.vocab_size, self._draw_error)
        return TorchStep.of(step, choice, logits, self._config.run_ahead, self._chosen)

    def logits(self, step: Step) -> np.ndarray:
        check_step(step, self._config, self._spec.vocab_size)
        logits = self._logits(step)
        self._count(step)
        return np.empty((0, self._spec.vocab_size), np.float32) if logits is None else logits[: len(step.samples)].cpu().numpy()

    @torch.inference_mode()
    def read_kv(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> tuple[KVBlock, ...]:
        check_page_range(page_table, tokens, self._config)
        return self._pool.read(page_table, tokens, out)

    @torch.inference_mode()
    def start_read_kv(self, page_table: np.ndarray, tokens: TokenRange, out: Sequence[np.ndarray] | None = None) -> PendingKV:
        check_page_range(page_table, tokens, self._config)
        return self._pool.start_read(page_table, tokens, out)

    @torch.inference_mode()
    def write_kv(self, page_table: np.ndarray, block: KVBlock) -> None:
        check_block(block, self._kv_spec)
        check_page_range(page_table, block.tokens, self._config)
        self._pool.write(page_table, block)

    @torch.inference_mode()
    def copy_page(self, source: int, destination: int) -> None:
        check_page("source", source, self._config)
        check_page("destination", destination, self._config)
        self._pool.copy_page(source, destination)

    def stats(self) -> EngineStats:
        fallbacks = {**self._fallbacks, **self._ops.fallbacks}
        recorded = replayed = 0
        if self._graphs is not None:
            recorded, replayed = self._graphs.num_recorded, self._graphs.num_replays
            fallbacks |= self._graphs.fallbacks
        return EngineStats(recorded, self._num_steps, fallbacks, dict(self._chosen), graphed_steps=replayed)

    @torch.inference_mode()
    def _logits(self, step: Step, fed: torch.Tensor | None = None) -> torch.Tensor | None:
        """``fed`` [T] i64: the tokens, instead of those that ``step`` has."""
        self._own_thread()
        graph = None if self._graphs is None else self._graphs.find(step)
        if graph is not None:
            return graph.run(step, fed)
        return self._forward(make_batch(step, self._ops, self._device, fed))

    def _forward(self, batch: Batch) -> torch.Tensor | None:
        return self._model.forward(batch, self._pool.layers)

    def _count(self, step: Step) -> None:
        self._num_steps += 1
        if self._graphs is not None:
            self._graphs.count(step)

    def _own_thread(self) -> None:
        """OpenMP's thread count belongs to the thread that calls, and the worker's step thread is not the one that loaded. So does the
        GPU on which Triton launches.
        """
        if self._thread != threading.get_ident():
            torch.set_num_threads(self._config.num_threads)
            if self._device.type == "cuda" and self._device.index is not None:
                torch.cuda.set_device(self._device)
            self._thread = threading.get_ident()


def _open_native(device: torch.device, cache_dir: str | None) -> tuple[Native | None, dict[str, int]]:
    """The native kernels of a CPU, and what to count where there are none."""
    if device.type != "cpu":
        return None, {}
    try:
        return Native(cache_dir), {}
    except NativeUnavailableError as error:
        logger.warning("slower operations instead of native kernels: %s", error)
        return None, {error.reason: 1}


def _recorder(device: torch.device) -> Recorder:
    if device.type != "cuda":
        raise ValueError(f"decode_graphs: given True, allowed False on device {str(device)!r}: only a CUDA device replays recorded steps")
    return CudaRecorder(device)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: given {name!r}, allowed a torch device such as 'cpu' or 'cuda:0'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: given {name!r}, allowed 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: given {name!r}, but torch {torch.__version__} sees no such device here, allowed 'cpu'")
    return device
