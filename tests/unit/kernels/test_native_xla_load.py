"""Registering the native kernels with XLA, without compiling them."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from pddkernels.native_xla import calls


@pytest.mark.parametrize("crosses", [False, True])
def test_kernels_are_registered_once_whatever_directory_they_are_kept_in(monkeypatch: pytest.MonkeyPatch, crosses: bool) -> None:
    built: list[str | None] = []
    registered: list[str] = []

    def compiled(name: str, sources: object, flags: object, cache_dir: str | None) -> SimpleNamespace:
        built.append(cache_dir)
        return SimpleNamespace(**dict.fromkeys(calls._TARGETS), pdd_crosses=lambda: int(crosses))

    monkeypatch.setattr(calls, "_registered", set())
    monkeypatch.setattr(calls, "_crosses", [])
    monkeypatch.setattr(calls, "compiled", compiled)
    monkeypatch.setattr(jax.ffi, "pycapsule", lambda function: function)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda name, function, platform: registered.append(name))
    calls.load("an engine's")
    calls.load(None)  # XLA would refuse the same name of another library
    assert built == ["an engine's"]
    assert registered == list(calls._TARGETS)
    assert calls.crosses() is crosses
