"""Case 104: the model's stop set is the union of every file that names an end token; ignore_eos switches off all of it and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pddbridge.checkpoint import open_checkpoint
from pddbridge.sampling_params import SamplingParams
from tests.support.tiny_models import make_tiny_llama


def edit(file: Path, **fields: object) -> None:
    """Set fields of a JSON file; None removes."""
    value = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: given for key, given in value.items() if given is not None}))


def stop_set(path: Path) -> tuple[int, ...]:
    return open_checkpoint(path).spec.eos_token_ids


@pytest.mark.parametrize(("config_eos", "from_config"), [(None, set()), (7, {7}), ([7, 9], {7, 9}), ([], set())])
@pytest.mark.parametrize(("generation_eos", "from_generation"), [(None, set()), (11, {11}), ([11, 7, 13], {11, 7, 13})])
@pytest.mark.parametrize(("tokenizer_eos", "from_tokenizer"), [(None, set()), ("<|im_end|>", {2}), ({"content": "<|endoftext|>"}, {0})])
def test_union_of_all_sources(
    tmp_path: Path,
    config_eos: object,
    from_config: set[int],
    generation_eos: object,
    from_generation: set[int],
    tokenizer_eos: object,
    from_tokenizer: set[int],
) -> None:
    make_tiny_llama(tmp_path, num_layers=1, hidden=32)
    edit(tmp_path / "config.json", eos_token_id=config_eos)
    edit(tmp_path / "generation_config.json", eos_token_id=generation_eos)
    edit(tmp_path / "tokenizer_config.json", eos_token=tokenizer_eos)
    assert stop_set(tmp_path) == tuple(sorted(from_config | from_generation | from_tokenizer))


def test_gguf_names_end_of_text_and_of_turn(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, form="gguf", num_layers=1)
    assert stop_set(tmp_path) == (0, 2)
    (tmp_path / "generation_config.json").unlink()
    assert stop_set(tmp_path) == (2,)
    (tmp_path / "tokenizer_config.json").unlink()
    assert stop_set(tmp_path) == (2,), "from the GGUF's own metadata"


def test_files_beside_the_weights_are_optional(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, num_layers=1)
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        (tmp_path / name).unlink()
    assert stop_set(tmp_path) == (2,)
    edit(tmp_path / "config.json", eos_token_id=None)
    assert stop_set(tmp_path) == ()


def test_tokenizer_id_comes_from_wherever_the_tokenizer_keeps_it(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, num_layers=1)
    edit(tmp_path / "config.json", eos_token_id=None)
    (tmp_path / "generation_config.json").unlink()
    edit(tmp_path / "tokenizer_config.json", eos_token="in")  # a merge: in the vocabulary, not an added token
    vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert stop_set(tmp_path) == (vocab["in"],)
    edit(tmp_path / "tokenizer_config.json", eos_token="</s>", added_tokens_decoder={"5": {"content": "</s>"}})
    assert stop_set(tmp_path) == (5,)
    edit(tmp_path / "tokenizer_config.json", eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<think>"}}))
    assert stop_set(tmp_path) == (3,)


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("config.json", {"eos_token_id": "2"}, "eos_token_id"),
        ("config.json", {"eos_token_id": [2, True]}, "eos_token_id"),
        ("config.json", {"eos_token_id": 300}, "300"),
        ("config.json", {"eos_token_id": -1}, "-1"),
        ("generation_config.json", {"eos_token_id": {"a": 1}}, "eos_token_id"),
        ("tokenizer_config.json", {"eos_token": 2}, "eos_token"),
        ("tokenizer_config.json", {"eos_token": "<nowhere>"}, "<nowhere>"),
    ],
)
def test_malformed_sources_are_refused_by_name(tmp_path: Path, file: str, fields: dict[str, object], said: str) -> None:
    make_tiny_llama(tmp_path, num_layers=1)
    edit(tmp_path / file, **fields)
    with pytest.raises(ValueError, match=said):
        open_checkpoint(tmp_path)


def test_ignore_eos_masks_the_whole_set_and_only_it(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, num_layers=1)
    eos = frozenset(stop_set(tmp_path))
    own = frozenset({44})
    params = SamplingParams(seed=0, max_tokens=9, eos_token_ids=eos, stop_token_ids=own)
    assert params.stop_set == {0, 2, 44}
    assert SamplingParams(seed=0, max_tokens=9, eos_token_ids=eos, stop_token_ids=own, ignore_eos=True).stop_set == {44}
