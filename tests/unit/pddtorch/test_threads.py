from __future__ import annotations

import subprocess
import sys

import pytest

from pddtorch.threads import environment


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, pddtorch, pddtorch.threads; assert pddtorch.threads.environment(2); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_environment_reaches_torch() -> None:
    code = "import torch; print(torch.get_num_threads())"
    result = subprocess.run([sys.executable, "-c", code], env=environment(1), capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"


def test_idle_threads_sleep() -> None:
    assert environment(1)["OMP_WAIT_POLICY"] == "passive"


def test_a_worker_alone_on_its_cores_may_look_out_for_work() -> None:
    """Neither of the variables that would make threads sleep at once, or never."""
    assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment(2, spin=True).keys()


def test_no_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="num_threads: given 0"):
        environment(0)
