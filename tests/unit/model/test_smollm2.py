"""The real model: what `pdd pull smollm2-135m` left in the cache holds the published weights, as transformers reads them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from pdd.models import pull
from pddbridge.checkpoint import open_checkpoint
from pddbridge.rope import RopeSpec
from tests.support import oracle

pytestmark = pytest.mark.smollm2

# of the dequantised weights; a change means that engines of two versions would refuse each other
DIGEST = "4d567e58c2489d70853609bf54335d693b5555602b659d898fbf5ecd86c60d47"


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return pull("smollm2-135m", Path(os.environ.get("PDD_CACHE") or Path.home() / ".cache" / "pdd"))


def test_spec_stop_set_and_digest(model_dir: Path) -> None:
    cpu_before = time.process_time()
    checkpoint = open_checkpoint(model_dir)
    opened_s = time.process_time() - cpu_before
    spec = checkpoint.spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.hidden_size) == (30, 9, 3, 64, 576)
    assert (spec.vocab_size, spec.ropes, spec.rms_norm_eps, spec.max_context_tokens) == (49152, (RopeSpec(100_000.0),), 1e-5, 8192)
    assert spec.tie_embeddings
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in spec.eos_token_ids
    assert checkpoint.weights_digest() == DIGEST
    assert opened_s < 1.0, "vocabularies must be stepped over: read element by element they take seconds"


@pytest.mark.slow
def test_every_tensor_is_what_transformers_reads(model_dir: Path) -> None:
    checkpoint = open_checkpoint(model_dir)
    expected = oracle.model(model_dir).state_dict()
    assert set(expected) - {"lm_head.weight"} == set(checkpoint.names)
    for name in checkpoint.names:
        np.testing.assert_array_equal(checkpoint.load(name), expected[name].numpy(), err_msg=name)
