"""Broken model directories are refused in one line that names what is wrong, before any weight is used (case 102)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pddbridge.checkpoint import CheckpointError, open_checkpoint
from tests.support.tiny_models import make_tiny_llama, tiny_tensors, write_gguf

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


def refused(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_json(file: Path, change: Callable[[dict[str, object]], object]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, form="sharded")
    (tmp_path / SHARD).unlink()
    assert SHARD in refused(tmp_path)


def test_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, form="sharded")
    tensors = load_file(tmp_path / SHARD)
    name, _ = tensors.popitem()
    save_file(tensors, tmp_path / SHARD)
    message = refused(tmp_path)
    assert name in message
    assert SHARD in message


def test_every_missing_tensor_is_listed(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = [name for name in tensors if name.startswith("model.layers.1.")]
    assert len(lost) > 8
    save_file({name: values for name, values in tensors.items() if name not in lost}, tmp_path / "model.safetensors")
    message = refused(tmp_path)
    assert all(name in message for name in lost)
    assert f"{len(lost)} of {len(tensors)}" in message


def test_missing_index_entry_is_named(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, form="sharded")
    name = "model.layers.2.self_attn.v_proj.weight"
    edit_json(tmp_path / INDEX, lambda index: index["weight_map"].pop(name))  # type: ignore[attr-defined]
    assert name in refused(tmp_path)


def test_index_entry_without_a_tensor_is_named(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, form="sharded")
    edit_json(tmp_path / INDEX, lambda index: index["weight_map"].update({"model.ghost": SHARD}))  # type: ignore[attr-defined]
    assert "model.ghost" in refused(tmp_path)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "{absolute}", "sub/elsewhere.safetensors"])
def test_index_may_not_leave_its_folder(tmp_path: Path, shard: str) -> None:
    """The file is there and holds the tensor: only its place is wrong."""
    model_dir = make_tiny_llama(tmp_path / "model", form="sharded")
    shard = shard.replace("{absolute}", str(tmp_path / "elsewhere.safetensors"))
    (model_dir / "sub").mkdir()
    save_file({"model.norm.weight": np.ones(64, np.float32)}, model_dir / shard)
    edit_json(model_dir / INDEX, lambda index: index["weight_map"].update({"model.norm.weight": shard}))  # type: ignore[attr-defined]
    assert f"same folder, given {shard}" in refused(model_dir)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": []}', "\xff"])
def test_broken_index(tmp_path: Path, content: str) -> None:
    make_tiny_llama(tmp_path, form="sharded")
    (tmp_path / INDEX).write_bytes(content.encode("latin-1"))
    assert INDEX in refused(tmp_path)


def test_stray_files_are_ignored(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, form="sharded")
    digest = open_checkpoint(tmp_path).weights_digest()
    (tmp_path / "model-00009-of-00003.safetensors").write_bytes(b"not a checkpoint")
    save_file({"model.norm.weight": np.zeros(64, np.float32)}, tmp_path / "adapter.safetensors")
    assert open_checkpoint(tmp_path).weights_digest() == digest


@pytest.mark.parametrize("keep", [0, 7, 8, 100, 3000, -1])
def test_truncated_safetensors(tmp_path: Path, keep: int) -> None:
    make_tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors" in refused(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_truncated_gguf(tmp_path: Path, share: float) -> None:
    make_tiny_llama(tmp_path, form="gguf")
    file = tmp_path / "tiny.gguf"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    assert "tiny.gguf: truncated or not GGUF" in refused(tmp_path)


def test_missing_gguf_tensor_is_listed(tmp_path: Path) -> None:
    """A file of two blocks whose header promises three."""
    make_tiny_llama(tmp_path, form="gguf", num_layers=2)
    reader = gguf.GGUFReader(tmp_path / "tiny.gguf", "r+")
    reader.fields["llama.block_count"].parts[-1][0] = 3
    reader.data.flush()
    message = refused(tmp_path)
    assert "9 of 30 tensors are missing" in message
    assert "model.layers.2.self_attn.q_proj.weight" in message


ONE_OF_EACH_SIZE = ["model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize("name", ONE_OF_EACH_SIZE)
def test_wrong_shape_is_named(tmp_path: Path, name: str) -> None:
    make_tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = tensors[name].shape
    tensors[name] = np.ascontiguousarray(tensors[name][:-1])
    save_file(tensors, tmp_path / "model.safetensors")
    message = refused(tmp_path)
    assert name in message
    assert str(expected) in message
    assert str(tensors[name].shape) in message


def test_transposed_square_is_not_confused_with_wrong_heads(tmp_path: Path) -> None:
    """Config and file disagree on the number of KV heads: k and v are named, q is not."""
    make_tiny_llama(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config.update(num_key_value_heads=4))
    message = refused(tmp_path)
    assert "k_proj" in message
    assert "q_proj" not in message


WITHOUT_A_PLACE = ["model.layers.0.self_attn.q_norm.weight", "model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"]


@pytest.mark.parametrize("extra", WITHOUT_A_PLACE)
def test_tensor_without_a_place_is_named(tmp_path: Path, extra: str) -> None:
    make_tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, extra: np.ones(16, np.float32)}, tmp_path / "model.safetensors")
    assert extra in refused(tmp_path)


def test_old_rotary_buffer_is_ignored(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    digest = open_checkpoint(tmp_path).weights_digest()
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).weights_digest() == digest


def test_foreign_dtype_is_named(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(64, np.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    message = refused(tmp_path)
    assert "model.norm.weight (I8)" in message


GGUF_WITHOUT_A_PLACE = [("rope_factors_long.weight", "rope_factors_long.weight"), ("blk.1.attn_q_norm.weight", "blk.1.attn_q_norm.weight")]


@pytest.mark.parametrize(("extra", "said"), GGUF_WITHOUT_A_PLACE)
def test_gguf_tensor_without_a_place_is_named(tmp_path: Path, extra: str, said: str) -> None:
    """The first is how GGUFs of Phi 3 carry their RoPE scaling."""
    directory = make_tiny_llama(tmp_path / "hf")
    config = json.loads((directory / "config.json").read_text())
    write_gguf(tmp_path / "tiny.gguf", config, tiny_tensors(config, 0), stored_as_is={extra: np.ones(8, np.float32)})
    with pytest.raises(ValueError, match=said):
        open_checkpoint(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "found none" in refused(tmp_path)


def test_two_ggufs(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, form="gguf")
    shutil.copy(tmp_path / "tiny.gguf", tmp_path / "other.gguf")
    message = refused(tmp_path)
    assert "other.gguf" in message
    assert "tiny.gguf" in message


def test_not_a_directory(tmp_path: Path) -> None:
    assert "not a directory" in refused(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    assert "not a directory" in refused(tmp_path / "file")


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "\xff\xfe"])
def test_config_missing_or_invalid(tmp_path: Path, content: str | None) -> None:
    make_tiny_llama(tmp_path)
    file = tmp_path / "config.json"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content.encode("latin-1"))
    assert "config.json" in refused(tmp_path)
