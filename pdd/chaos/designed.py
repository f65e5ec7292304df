"""What is to become of a request when somebody dies in each state of its life: the failure table of the design, cell by cell. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from pdd.chaos.outcome import Outcome
from pdd.chaos.states import State

# link: the process that carries it, so both its ports · kv: every connection that carries KV over it
Victim = Literal["prefill", "relay", "main", "coordinator", "link", "kv"]
VICTIMS: Final[tuple[Victim, ...]] = ("prefill", "relay", "main", "coordinator", "link", "kv")


@dataclass(frozen=True)
class Designed:
    """``ends``: how it may end · ``rest_by``: who makes the tokens after the death, None for either · ``unnoticed``: nothing is to be done
    again, so no fallback is counted · ``text``: for the table.
    """

    text: str
    ends: tuple[str, ...] = ("finished",)
    rest_by: Literal["relay", "main"] | None = None
    unnoticed: bool = False

    def objection(self, outcome: Outcome, had_tokens: int) -> str | None:
        """What is not as designed; ``had_tokens``: that the client had at the death. Tokens under way then may still come from the dead."""
        if outcome.end not in self.ends:
            return f"ended {outcome.end} ({outcome.code or outcome.finish_reason}: {outcome.message})"
        if outcome.end != "finished":
            return None
        last = outcome.origins[-1] if len(outcome.origins) > had_tokens else None
        if self.rest_by is not None and last not in (self.rest_by, None):
            return f"the end was made by {last}"
        fallbacks = int(str(outcome.timeline.get("fallbacks", 0)))
        if self.unnoticed and fallbacks:
            return f"{fallbacks} fallbacks were counted"
        return None


_ERROR: Final = Designed("ends with an error, workers let go", ends=("error", "broken"))
_RELAY_GOES_ON: Final = Designed("relay goes on", rest_by="relay")
_MAIN_GOES_ON: Final = Designed("main goes on from the log", rest_by="main")
_UNNOTICED: Final = Designed("nothing is lost", unnoticed=True)
_RESUMED: Final = Designed("transfer resumes", rest_by="main", unnoticed=True)
_BEFORE_KV: Final[tuple[State, ...]] = ("queued", "prefilling", "awaiting_kv", "relaying")


def designed(state: State, victim: Victim) -> Designed:
    """With one worker of each role: where another would take over, whoever is left stands in."""
    if state == "finishing":
        return Designed("has its answer", ends=("finished", "broken") if victim == "coordinator" else ("finished",))
    if victim == "coordinator":
        return _ERROR
    if victim == "prefill":
        if state == "queued":
            return Designed("main computes the prompt", rest_by="main")
        return Designed("main computes the prompt", rest_by="main") if state in _BEFORE_KV else _UNNOTICED
    if victim == "relay":
        if state == "awaiting_kv":
            return _UNNOTICED  # it has no part in it
        return _UNNOTICED if state == "main" else _MAIN_GOES_ON
    if victim == "main":
        if state == "awaiting_kv":
            return Designed("relay computes the prompt", rest_by="relay")
        return Designed("relay computes prompt and log", rest_by="relay") if state == "main" else _RELAY_GOES_ON
    if victim == "kv":
        return _RESUMED if state in _BEFORE_KV else _UNNOTICED
    # The link takes main's streams along: for a request that is the death of main, for another it is main come back.
    return Designed("goes on at the near side")
