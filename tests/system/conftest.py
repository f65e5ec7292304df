"""Deployments that system tests share; each starts once per session, and after every test all workers must be idle with pages adding up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdd.launch.local import Deployment
from pdd.models import resolve
from tests.support.deployments import assert_idle, launch_config
from tests.support.tiny_models import make_tiny_llama


@dataclass(frozen=True)
class Running:
    """A deployment that is up, with the model directory it serves."""

    deployment: Deployment
    model: str
    model_dir: Path

    @property
    def url(self) -> str:
        return self.deployment.http_url


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Models and compiled programs, kept between runs."""
    return Path(os.environ.get("PDD_CACHE") or Path.home() / ".cache" / "pdd")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 KV heads against pages of 16 and 32: no two sizes alike."""
    return make_tiny_llama(
        tmp_path_factory.mktemp("tiny"), num_heads=6, num_kv_heads=3, hidden=48, head_dim=16, num_layers=3, max_context=512
    )


@pytest.fixture(scope="session")
def tiny_default_session(tiny_model: Path, cache_dir: Path) -> Iterator[Running]:
    with Deployment(launch_config(str(tiny_model)), cache_dir) as deployment:
        deployment.start()
        yield Running(deployment, str(tiny_model), tiny_model)


@pytest.fixture(scope="session")
def tiny_mirror_session(tiny_model: Path, cache_dir: Path) -> Iterator[Running]:
    with Deployment(launch_config(str(tiny_model), engines=("torch", "torch", "jax")), cache_dir) as deployment:
        deployment.start()
        yield Running(deployment, str(tiny_model), tiny_model)


@pytest.fixture
def tiny(tiny_default_session: Running) -> Iterator[Running]:
    """JAX, JAX, PyTorch over a tiny model."""
    yield tiny_default_session
    assert_idle(tiny_default_session.deployment)


@pytest.fixture
def tiny_mirror(tiny_mirror_session: Running) -> Iterator[Running]:
    """PyTorch, PyTorch, JAX over a tiny model."""
    yield tiny_mirror_session
    assert_idle(tiny_mirror_session.deployment)


@pytest.fixture(scope="session")
def smollm2_dir(cache_dir: Path) -> Path:
    return resolve("smollm2-135m", cache_dir)
