"""Stop strings over a stream of text: nothing of a match is ever released, and nothing that cannot become a match is held back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopStep:
    """``text``: released now. ``stopped``: a stop string is complete; ``text`` ends where it began, and what followed is dropped."""

    text: str
    stopped: bool


class StopStrings:
    """The stop string that is complete first ends the text; of several complete at the same character, the longest. So how the text was
    cut into pieces does not matter."""

    def __init__(self, stop_strings: Sequence[str], include: bool = False) -> None:
        """``include``: the match itself is released. Raises ValueError for an empty string."""
        self._include = include
        for index, stop in enumerate(stop_strings):
            if not stop:
                raise ValueError(f"stop[{index}]: given '', allowed strings of at least one character")
        self._stop_strings = tuple(stop_strings)
        self._held = ""

    def push(self, text: str, armed: bool = True) -> StopStep:
        """Add ``text``. Unless ``armed``, a match whose last character is in ``text`` does not count, now or later."""
        checked = len(self._held)
        self._held += text
        if armed:
            matches = [(start + len(stop), start) for stop in self._stop_strings if (start := self._find(stop, checked)) >= 0]
            if matches:
                end, start = min(matches)
                released, self._held = self._held[: end if self._include else start], ""
                return StopStep(released, stopped=True)
        keep = max((self._overlap(stop) for stop in self._stop_strings), default=0)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return StopStep(released, stopped=False)

    def finish(self) -> str:
        """The text held back, which no stop string can complete any more."""
        released, self._held = self._held, ""
        return released

    def _find(self, stop: str, checked: int) -> int:
        """Start of the first match that ends after ``checked`` characters, or -1 as str.find."""
        return self._held.find(stop, max(0, checked - len(stop) + 1))

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that is a proper beginning of ``stop``."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
