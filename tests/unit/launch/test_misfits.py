"""`pdd check` names what this machine lacks of a config; what another machine may well have is a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pdd.cli import app
from pdd.config import LaunchConfig, load
from pdd.misfits import misfits
from tests.support.tiny_models import make_tiny_llama

CONFIGS = Path(__file__).parents[3] / "configs"


def test_files_that_are_not_there_are_named_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(CONFIGS / "local-secure.yaml")
    monkeypatch.chdir(tmp_path)
    Path("certs").mkdir()
    Path("certs/ca.pem").write_text("")
    Path("api_keys.yaml").write_text("alice: 1")
    fields = [misfit.line.partition(": ")[0] for misfit in misfits(config, range(64))]
    assert fields == ["security.cert", "security.key"] * 4 + ["security.door_cert", "security.door_key", "security.api_keys"]


def config_with_cores(model: Path, host: str) -> LaunchConfig:
    raw = load(CONFIGS / "local.yaml").model_dump(mode="json")
    raw["model"], raw["security"]["allow_plaintext"] = str(model), True
    raw["workers"][0] |= {"cpus": [0, 99999], "host": host}
    return LaunchConfig.model_validate(raw)


@pytest.mark.parametrize(("host", "prefix", "status"), [("127.0.0.1", "pdd: workers", 1), ("10.0.0.5", "pdd: warning: workers", 0)])
def test_cores_that_this_machine_has_not(host: str, prefix: str, status: int, tmp_path: Path) -> None:
    config = config_with_cores(make_tiny_llama(tmp_path / "m"), host)
    (tmp_path / "launch.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    done = CliRunner().invoke(app, ["check", str(tmp_path / "launch.yaml")])
    assert f"{prefix}.prefill-0.cpus: given [0, 99999], this machine has [0" in done.output
    assert done.exit_code == status, done.output
    assert misfits(config, [0, 99999]) == []
