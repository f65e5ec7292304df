"""Weights that are in no file: the same on every side, none like another, and an engine on them is an engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pddbridge.checkpoint import expected_shapes
from pddbridge.random_checkpoint import RandomCheckpoint
from pddjax.engine import create_from
from pddtorch.engine import TorchEngine
from tests.support.engines import CONFIG, decode_greedy, prefill, random_ids
from tests.support.specs import llama_spec

SPEC = llama_spec(qkv_bias=True, qk_norm=True)


def test_tensors_follow_from_seed_name_and_shape() -> None:
    checkpoint = RandomCheckpoint(SPEC, seed=3)
    assert {name: checkpoint.load(name).shape for name in checkpoint.names} == expected_shapes(SPEC)
    again, other = RandomCheckpoint(SPEC, seed=3), RandomCheckpoint(SPEC, seed=4)
    for name in checkpoint.names:
        np.testing.assert_array_equal(checkpoint.load(name), again.load(name))
        assert (checkpoint.load(name) != other.load(name)).mean() > 0.9
    q, k = (checkpoint.load(f"model.layers.{layer}.self_attn.q_proj.weight") for layer in (0, 1))
    assert (q != k).mean() > 0.9
    assert np.std(q) * SPEC.hidden_size**0.5 == pytest.approx(1, rel=0.1)
    with pytest.raises(KeyError):
        checkpoint.load("lm_head.bias")


def test_digests_tell_checkpoints_apart() -> None:
    digests = {
        RandomCheckpoint(SPEC, 3).weights_digest(),
        RandomCheckpoint(SPEC, 4).weights_digest(),
        RandomCheckpoint(SPEC, 3, "bfloat16").weights_digest(),
        RandomCheckpoint(replace(SPEC, qk_norm=False), 3).weights_digest(),
    }
    assert len(digests) == 4
    assert RandomCheckpoint(SPEC, 3).weights_digest() in digests


def test_a_tensor_longer_than_what_is_drawn_repeats_no_row() -> None:
    embedding = RandomCheckpoint(llama_spec(vocab_size=50_000), 0, "bfloat16").load("model.embed_tokens.weight").astype(np.float32)
    assert embedding.shape == (50_000, 48)
    assert len(np.unique(embedding[:, :4], axis=0)) > 49_000


def test_both_engines_make_the_same_model_of_it() -> None:
    prompt = random_ids(0, 21)
    streams = []
    for engine in (create_from(RandomCheckpoint(SPEC, 1), CONFIG), TorchEngine(RandomCheckpoint(SPEC, 1), CONFIG)):
        prefill(engine, prompt[:-1], [4, 1, 7, 2])
        streams.append(decode_greedy(engine, prompt, [4, 1, 7, 2], 8))
    assert streams[0] == streams[1]
    assert len(set(streams[0])) > 3
