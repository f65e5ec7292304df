"""What libtpu makes of a product with int8 weights, for chips that are not here: it must read them as they are stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdd.compile.children import _ENVIRONMENT

OUT, IN = 4096, 8192
PROGRAM = f"""
import json
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from pddjax.model import Projection
from pddkernels.targets.hardware import target
from pddkernels.targets.tpu import argument, compile_for_tpu, devices

def compiled(mesh, tokens, int8):
    graph, state = nnx.split(nnx.eval_shape(lambda: Projection({IN}, {OUT}, False, jnp.dtype("bfloat16"), int8=int8)))
    leaves = jax.tree.map(lambda leaf: argument(leaf.shape, leaf.dtype, mesh), state)
    x = argument(({IN}, tokens), jnp.bfloat16, mesh)
    found = compile_for_tpu(lambda state, x: nnx.merge(graph, state)(x), (leaves, x))
    memory = found.memory_analysis()
    return memory.argument_size_in_bytes, memory.temp_size_in_bytes, found.cost_analysis()["bytes accessed"]

for name in ("tpu-v5e", "tpu-v6e", "tpu-v5p"):
    mesh = Mesh(devices(target(name))[:1], ("one",))
    for tokens in (64, 2048):
        print(json.dumps([name, tokens, compiled(mesh, tokens, True), compiled(mesh, tokens, False)]))
"""


def test_int8_weights_are_read_as_int8_and_never_widened_in_memory() -> None:
    """A weight that is widened first would be a temporary of 2 bytes a value, written and read again."""
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    weights = OUT * IN
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 6
    for name, tokens, (arguments, temporaries, read), (wide_arguments, _, wide_read) in lines:
        assert wide_arguments - arguments == pytest.approx(weights, rel=0.01), name
        assert temporaries < weights / 16, (name, tokens)
        assert read < wide_read - 0.99 * weights, (name, tokens)
        if tokens == 64:  # weights are nearly all there is to read
            assert weights < read < 1.25 * weights, name
