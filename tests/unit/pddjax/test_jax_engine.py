"""What is particular to the JAX engine; what both engines owe is in tests/conformance/test_engine_contract.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pddbridge.checkpoint import open_checkpoint
from pddbridge.kv_spec import TokenRange
from pddbridge.rope import RopeSpec
from pddjax.batch import empty_decode, empty_ragged
from pddjax.engine import create
from pddjax.fused import FusedFunctions
from pddjax.host_memory import together
from pddjax.programs import ModelFunctions
from pddjax.threads import environment
from pddjax.weights import load_model, rope_table
from pddkernels.jax_ops import JaxOps
from pddkernels.native_xla import calls as native_calls
from tests.support.engines import CONFIG, Row, random_ids, step_of
from tests.support.tiny_models import make_tiny_llama

WORKER = """
import json, os, sys
from pathlib import Path
from pddbridge.engine import EngineConfig
from pddjax.engine import create
import jax

compiled, hits = [], []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None)
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
config = EngineConfig(**json.loads(sys.argv[2]))
engine = create(sys.argv[1], config)
engine.warm_up(lambda done, total, what: None)
pool = sum(Path(f"/proc/self/task/{thread}/comm").read_text().strip() == "tf_XLAEigen" for thread in os.listdir("/proc/self/task"))
print(json.dumps({"compilations": engine.stats().compilations, "hits": len(hits), "asked": len(compiled), "pool": pool,
                  "fallbacks": engine.stats().fallbacks}))
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), num_layers=1)


def run_worker(model_dir: Path, num_threads: int, cache: Path) -> dict[str, object]:
    config = replace(CONFIG, num_threads=num_threads, max_step_tokens=16, max_rows=1, compile_cache_dir=str(cache))
    arguments = [sys.executable, "-c", WORKER, str(model_dir), json.dumps(asdict(config))]
    done = subprocess.run(arguments, env=os.environ | environment(num_threads), capture_output=True, text=True, check=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


@pytest.mark.timeout(1800)  # the first compiles native code too: a minute of processor time, which may take many on a busy machine
def test_a_second_process_compiles_nothing_and_has_the_threads_it_asked_for(model_dir: Path, tmp_path: Path) -> None:
    first, second = run_worker(model_dir, 3, tmp_path), run_worker(model_dir, 3, tmp_path)
    assert (first["pool"], second["pool"]) == (3, 3)
    assert first["fallbacks"] == {"num_threads_not_applied": 0}
    assert first["compilations"] == second["compilations"]
    assert first["hits"] == 0
    assert second["hits"] == second["asked"] == first["asked"]


def test_importing_the_package_and_its_threads_imports_no_jax() -> None:
    code = "import sys, pddjax.threads; print(any(name.split('.')[0] in ('jax', 'jaxlib') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
    with pytest.raises(ValueError, match="num_threads"):
        environment(0)


def test_an_engine_on_the_cpu_opens_no_tpu() -> None:
    """Though libtpu is installed: it is not even loaded. A worker for another device decides for itself."""
    code = "import jax; assert jax.devices('cpu'); print('libtpu' in open('/proc/self/maps').read())"
    bare = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    ended = subprocess.run([sys.executable, "-c", code], env=bare | environment(1), capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.strip() == "False"
    assert "JAX_PLATFORMS" not in environment(1, "tpu")


def test_a_thread_count_that_is_not_in_force_is_counted(model_dir: Path) -> None:
    assert jnp.zeros(1).sum() == 0  # the client exists, with the threads it has
    assert create(str(model_dir), replace(CONFIG, num_threads=61)).stats().fallbacks == {"num_threads_not_applied": 1}


def test_layers_run_whole_in_float32_and_are_a_counted_fallback_in_other_dtypes(model_dir: Path) -> None:
    engine, other = create(str(model_dir), CONFIG), create(str(model_dir), replace(CONFIG, compute_dtype="bfloat16"))
    assert isinstance(engine._functions, FusedFunctions)
    assert isinstance(other._functions, ModelFunctions)
    assert "portable_layers_compute_dtype" not in engine.stats().fallbacks
    assert other.stats().fallbacks["portable_layers_compute_dtype"] == 1


def test_arrays_laid_together_are_copies_on_cache_lines_that_outlive_one_another() -> None:
    given = [np.arange(7, dtype=np.float32), np.zeros(0, np.float32), np.arange(24, dtype=np.int32).reshape(2, 3, 4)]
    copies = together(given)
    assert copies[0].ctypes.data % 2**21 == 0
    assert all(copy.ctypes.data % 64 == 0 for copy in copies)
    placed = jax.device_put(copies[2], jax.devices("cpu")[0])
    last = copies.pop()
    del copies
    given[2][:] = 0
    assert np.array_equal(last, np.arange(24).reshape(2, 3, 4))
    assert placed.unsafe_buffer_pointer() == last.ctypes.data  # XLA copied nothing


def test_every_call_that_writes_takes_the_pool_over(model_dir: Path) -> None:
    """The arrays from before are gone: they were updated in place, not copied."""
    engine = create(str(model_dir), CONFIG)
    ids = random_ids(0, 9)
    k, _ = engine.read_kv(np.array([3], np.int32), TokenRange(0, 4))
    for run in (
        lambda: engine.step(step_of(Row(ids, 0, [1, 2]))),
        lambda: engine.step(step_of(Row(ids[:1], 9, [1, 2]))),
        lambda: engine.write_kv(np.array([3], np.int32), k),
        lambda: engine.copy_page(1, 4),
    ):
        before = list(engine._pool.pages)
        run()
        assert all(pages.is_deleted() for pages in before)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_no_program_copies_the_pool(model_dir: Path, kv_dtype: str, fused: bool) -> None:
    """Pages are updated in place (aliased) and no temporary grows with their number, on both sides of any 16-bit detour."""
    checkpoint = open_checkpoint(model_dir)
    model = load_model(checkpoint, jnp.dtype("float32"), 160, jax.devices("cpu")[0])
    native_calls.load(None)
    ops = JaxOps("portable", jnp.dtype(kv_dtype), kv_heads=2, head_dim=16, native=fused)
    functions = FusedFunctions(model, jax.devices("cpu")[0]) if fused else ModelFunctions(model, ops)
    stored = jnp.uint16 if kv_dtype == "bfloat16" else jnp.float32
    temporaries = []
    for num_pages in (40, 4000):
        config = replace(CONFIG, num_pages=num_pages, kv_dtype=kv_dtype)
        layer = jax.ShapeDtypeStruct((num_pages, 8, 4, 16), stored)
        layer_bytes = layer.size * layer.dtype.itemsize
        slots = jax.ShapeDtypeStruct((128,), jnp.int32)
        token = jax.ShapeDtypeStruct((128, 2, 16), stored)
        wanted = jax.ShapeDtypeStruct((4,), jnp.bool_)
        cases = (
            (functions.decode, 1, (functions.leaves, [layer], empty_decode(config, 4))),
            (functions.ragged, 1, (functions.leaves, [layer], empty_ragged(config, 64, ops))),
            (ops.write, 0, (layer, token, wanted, slots)),
            (ops.copy_page, 0, (layer, np.int32(0), np.int32(1))),
            (ops.read, None, (layer, slots)),
        )
        sizes = []
        for function, donated, arguments in cases:
            donate = () if donated is None else (donated,)
            memory = jax.jit(function, donate_argnums=donate).lower(*arguments).compile().memory_analysis()
            assert memory.alias_size_in_bytes >= (0 if donated is None else layer_bytes)
            sizes.append(memory.temp_size_in_bytes)
        temporaries.append(sizes)
    assert temporaries[0] == temporaries[1]


@pytest.mark.parametrize("num_rows", [2, 4])
def test_products_have_the_weights_on_the_left_and_copy_none(model_dir: Path, num_rows: int) -> None:
    """The fast orientation on XLA:CPU survives its simplifications, and temporaries stay far below a layer's largest weight."""
    wide = make_tiny_llama(model_dir.parent / f"wide{num_rows}", num_layers=1, hidden=256, intermediate=1024, head_dim=8)
    checkpoint = open_checkpoint(wide)
    model = load_model(checkpoint, jnp.dtype("float32"), 160, jax.devices("cpu")[0])
    functions = ModelFunctions(model, JaxOps("portable", jnp.dtype("float32"), kv_heads=2, head_dim=8))
    layer = jax.ShapeDtypeStruct((40, 8, 4, 8), jnp.float32)
    batch = empty_decode(CONFIG, num_rows)
    compiled = jax.jit(functions.decode, donate_argnums=1).lower(functions.leaves, [layer], batch).compile()
    products = re.findall(r"f32\[(\d+),(\d+)\]\{1,0\} dot\(", compiled.as_text())
    by_out_features = {(int(out), int(columns)) for out, columns in products}
    assert {(64, num_rows), (256, num_rows), (2048, num_rows)} <= by_out_features
    assert not any(rows == num_rows for rows, _ in by_out_features)
    gate_up_bytes = 2 * 1024 * 256 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < gate_up_bytes / 8


def test_rope_table_follows_the_formula_at_far_positions(model_dir: Path) -> None:
    spec = replace(open_checkpoint(model_dir).spec, head_dim=64, ropes=(RopeSpec(100_000.0),))
    ((cos, sin),) = rope_table(spec, 8192)
    angles = np.arange(8192)[:, None] * 100_000.0 ** (-np.arange(32) / 32)
    # float32 angles: half a unit in the last place of 8192 radians, and that of the frequency times the position.
    assert np.abs(cos - np.cos(angles)).max() < 2e-3
    assert np.abs(sin - np.sin(angles)).max() < 2e-3
    assert cos.dtype == np.float32
