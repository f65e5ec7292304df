from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from pdd.serving.text.model import TextModel
from tests.support.doors import Doors, open_doors
from tests.support.scripted_coordinator import ScriptedCoordinator
from tests.support.tiny_models import make_tiny_llama


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(make_tiny_llama(tmp_path_factory.mktemp("doors") / "tiny", num_layers=1))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_doors(text: TextModel) -> AsyncGenerator[Doors, None]:
    async with open_doors(ScriptedCoordinator(text)) as opened:
        yield opened


@pytest.fixture
def doors(module_doors: Doors) -> Doors:
    """One pair of doors for a module; each test sees only its own requests and healthy workers."""
    module_doors.coordinator.requests.clear()
    module_doors.unhealthy.clear()
    return module_doors
