"""A default deployment's ports: on loopback alone, and what comes in is no code."""

from __future__ import annotations

from pathlib import Path

import pytest

from pddbridge.sampling_params import SamplingParams
from tests.support.clients import body_of, complete_all
from tests.support.ports import assert_only_configured, bomb, throw_everywhere
from tests.system.conftest import Running

pytestmark = pytest.mark.system


def test_nothing_listens_but_on_loopback(tiny: Running) -> None:
    assert_only_configured(tiny.deployment, more_per_worker=2)  # NIXL: its control port and its library's own


def test_a_pickle_at_any_port_is_refused(tiny: Running, tmp_path: Path) -> None:
    """Case 109."""
    file = tmp_path / "boom"
    throw_everywhere(tiny.deployment, bomb(file))
    assert not file.exists()
    params = SamplingParams(seed=1, max_tokens=4, temperature=0.0, ignore_eos=True)
    (answer,) = complete_all(tiny.url, [body_of(tiny.model, [10, 20, 30], params)])
    assert len(answer.ids) == 4
