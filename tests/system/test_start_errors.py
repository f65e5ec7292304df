"""A launch that cannot work ends with one clear line and status 1, and leaves no process behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support.deployments import launch_config
from tests.support.tiny_models import make_tiny_llama

pytestmark = pytest.mark.system


def serve(config: dict[str, object] | str, tmp_path: Path, cache_dir: Path) -> tuple[int, str]:
    """`pdd serve` on this config: its status and what it said last on stderr. No child may outlive it."""
    file = tmp_path / "launch.yaml"
    file.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    command = [sys.executable, "-m", "pdd.cli", "serve", str(file), "--once"]
    marker = str(tmp_path)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "PDD_CACHE": str(cache_dir), "TMPDIR": marker}
    )
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if any(marker in part for part in p.info["cmdline"] or [])]
    assert left == []
    return done.returncode, done.stderr.strip()


def config_for(model: Path, **changes: object) -> dict[str, object]:
    return {**launch_config(str(model)).model_dump(mode="json"), **changes}


def worker_changed(config: dict[str, object], name: str, **changes: object) -> dict[str, object]:
    workers = config["workers"]
    assert isinstance(workers, list)
    return {**config, "workers": [{**w, **changes} if w["name"] == name else w for w in workers]}


def test_unknown_model(tmp_path: Path, cache_dir: Path):
    status, said = serve({**launch_config("x").model_dump(mode="json"), "model": "no-such-model"}, tmp_path, cache_dir)
    assert status == 1
    assert "no-such-model" in said
    assert len(said.splitlines()) == 1


def test_config_mistakes_name_the_field(tmp_path: Path, cache_dir: Path, tiny_model: Path):
    status, said = serve(worker_changed(config_for(tiny_model), "main-0", page_size=-4), tmp_path, cache_dir)
    assert status == 1
    assert "workers.2.page_size" in said
    assert "-4" in said
    status, said = serve("workers: [", tmp_path, cache_dir)
    assert status == 1
    assert "not YAML" in said


def test_port_in_use(tmp_path: Path, cache_dir: Path, tiny_model: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = config_for(tiny_model)
        serving = {**config["serving"], "http_port": taken.getsockname()[1]}  # type: ignore[dict-item]
        status, said = serve({**config, "serving": serving}, tmp_path, cache_dir)
    assert status == 1
    assert "serving.http_port" in said
    assert len(said.splitlines()) == 1


def test_broken_checkpoint_names_what_is_missing(tmp_path: Path, cache_dir: Path, tiny_model: Path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    status, said = serve(config_for(broken), tmp_path, cache_dir)
    assert status == 1
    assert "safetensors" in said
    assert len(said.splitlines()) == 1


def test_different_models_on_the_two_sides_are_refused_with_both_fingerprints(tmp_path: Path, cache_dir: Path, tiny_model: Path):
    other = make_tiny_llama(tmp_path / "other", num_heads=6, num_kv_heads=3, hidden=48, head_dim=16, num_layers=3, max_context=512, seed=1)
    status, said = serve(worker_changed(config_for(tiny_model), "main-0", model=str(other)), tmp_path, cache_dir)
    assert status == 1
    assert "fingerprint" in said
    assert "prefill-0" in said
    assert "main-0" in said
