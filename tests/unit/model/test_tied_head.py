"""Case 101: the head is what the checkpoint holds, whatever the config says about tying; every disagreement is said aloud."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pddbridge.checkpoint import open_checkpoint
from tests.support import numpy_llama, oracle
from tests.support.tiny_models import Form, make_tiny_llama, tiny_tensors, write_gguf, write_sharded

IDS = [1, 57, 260, 3, 99, 250, 17]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Head = Literal["absent", "equal", "different"]


def make(path: Path, form: Form, says_tied: bool, head: Head) -> Path:
    """A model directory whose config and head are as asked. All have the same other weights."""
    make_tiny_llama(path, tie=False)
    config = json.loads((path / "config.json").read_text())
    tensors = tiny_tensors(config, seed=0)
    if head == "absent":
        del tensors[HEAD]
    elif head == "equal":
        tensors[HEAD] = tensors[EMBEDDING].copy()
    config["tie_word_embeddings"] = says_tied
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").unlink()
    if form == "gguf":
        (path / "config.json").unlink()
        write_gguf(path / "tiny.gguf", config, tensors)
    elif form == "sharded":
        write_sharded(path, tensors, num_shards=2)
    else:
        save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("form", ["safetensors", "sharded", "gguf"])
@pytest.mark.parametrize("says_tied", [False, True])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_head_is_what_the_file_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture, form: Form, says_tied: bool, head: Head) -> None:
    with caplog.at_level(logging.WARNING, logger="pddbridge.checkpoint"):
        checkpoint = open_checkpoint(make(tmp_path / "asked", form, says_tied, head))
    tied = head != "different"
    assert checkpoint.spec.tie_embeddings == tied
    assert (HEAD in checkpoint.names) == (not tied)
    # a GGUF has no flag: nothing it could contradict
    contradicts = form != "gguf" and ((head == "absent" and not says_tied) or (head == "different" and says_tied))
    assert len(checkpoint.warnings) == contradicts
    assert [record.getMessage() for record in caplog.records] == list(checkpoint.warnings)
    reference = make(tmp_path / "reference", "safetensors", says_tied=tied, head=head)
    np.testing.assert_allclose(numpy_llama.logits(checkpoint, IDS), oracle.logits(reference, IDS), atol=2e-4)


def test_a_tied_model_has_one_digest(tmp_path: Path) -> None:
    digests = {
        (form, says_tied, head): open_checkpoint(make(tmp_path / f"{form}-{says_tied}-{head}", form, says_tied, head)).weights_digest()
        for form in ("safetensors", "gguf")
        for says_tied in (False, True)
        for head in ("absent", "equal", "different")
    }
    tied = {digest for (_, _, head), digest in digests.items() if head != "different"}
    untied = {digest for (_, _, head), digest in digests.items() if head == "different"}
    assert (len(tied), len(untied)) == (1, 1)
    assert tied != untied


@pytest.mark.parametrize("row", [0, 4097])
def test_a_head_that_differs_in_one_value_is_used(tmp_path: Path, row: int) -> None:
    """The comparison runs in pieces of 4096 rows: a difference in any of them counts."""
    path = make_tiny_llama(tmp_path, tie=True, vocab=4098, hidden=32, num_layers=1)
    tensors = load_file(path / "model.safetensors")
    tensors[HEAD] = tensors[EMBEDDING].copy()
    save_file(tensors, path / "model.safetensors")
    assert open_checkpoint(path).spec.tie_embeddings
    tensors[HEAD][row, -1] += 1.0
    save_file(tensors, path / "model.safetensors")
    assert not open_checkpoint(path).spec.tie_embeddings
