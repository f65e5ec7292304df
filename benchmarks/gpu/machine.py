"""What this machine is, as one process that has imported torch says; the parts start only after it has answered."""

from __future__ import annotations

import importlib
import os
import platform
from importlib import metadata

_PACKAGES = ("torch", "triton", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "safetensors", "crc32c")


def describe() -> dict[str, str]:
    """By name; ``gpu`` only where torch sees a CUDA device."""
    facts = {"python": platform.python_version(), "cores": str(os.cpu_count()), "machine": platform.machine()}
    facts |= {package: _version(package) for package in _PACKAGES}
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return facts | {"no_gpu": f"torch cannot be imported: {error}"}
    if not torch.cuda.is_available():
        return facts | {"no_gpu": f"torch {torch.__version__} sees no CUDA device"}
    properties = torch.cuda.get_device_properties(0)
    return facts | {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": str(properties.multi_processor_count),
        "memory_gb": f"{properties.total_memory / 1e9:.0f}",
        "cuda": str(torch.version.cuda or torch.version.hip),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
