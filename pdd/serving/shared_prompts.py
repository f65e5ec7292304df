"""Requests with the same prompt that run at the same time: one brings the prompt's KV, the others wait until it is there.

The choices of a call with ``n`` > 1 are such requests, and so are equal prompts of one tenant in different calls. The first to come
leads and runs as if it were alone. A follower is let in where the leader's KV has arrived, at the relay in milliseconds, at main later,
and finds it in that worker's prefix cache. Nobody waits for a leader longer than it runs: then the next one leads.

Everything happens on the event loop; nothing here awaits but :meth:`PromptShare.enter`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

# lead: bring the KV yourself · relay: the relay has it, main will · main: main has it · alone: waited long enough
Entry = Literal["lead", "relay", "main", "alone"]
# A follower that was not let in for this long runs by itself: its own transfer would have been under way by now.
SHARE_WAIT_S = 30.0


@dataclass
class _Prompt:
    """``relay``, ``main``: names of the workers where the prompt's KV is known to be · ``relay_coming``: on its way to a relay."""

    members: list[PromptShare] = field(default_factory=list)
    leader: PromptShare | None = None
    relay: str | None = None
    main: str | None = None
    relay_coming: bool = False


class SharedPrompts:
    """All prompts that running requests have."""

    def __init__(self) -> None:
        self._prompts: dict[tuple[str, tuple[int, ...]], _Prompt] = {}

    def join(self, tenant: str, prompt_ids: tuple[int, ...]) -> PromptShare:
        """A request begins. It must ``leave``."""
        key = (tenant, prompt_ids)
        prompt = self._prompts.setdefault(key, _Prompt())
        share = PromptShare(prompt, lambda: self._prompts.pop(key))
        for member in prompt.members:
            if member._when_joined is not None:
                member._when_joined()
        prompt.members.append(share)
        return share

    def __len__(self) -> int:
        return len(self._prompts)


class PromptShare:
    """One request's part in its prompt."""

    def __init__(self, prompt: _Prompt, forget: Callable[[], object]) -> None:
        self._prompt = prompt
        self._forget = forget
        self._changed = asyncio.Event()
        self._when_main: Callable[[], None] | None = None
        self._when_joined: Callable[[], None] | None = None

    @property
    def is_shared(self) -> bool:
        """Whether others with the same prompt run now."""
        return len(self._prompt.members) > 1

    def when_joined(self, callback: Callable[[], None]) -> None:
        """``callback`` is called whenever another request with the same prompt begins."""
        self._when_joined = callback

    @property
    def relay(self) -> str | None:
        """The relay worker that has the prompt's KV."""
        return self._prompt.relay

    @property
    def main(self) -> str | None:
        """The main worker that has the prompt's KV."""
        return self._prompt.main

    async def enter(self, may_relay: bool, must_relay: bool, timeout_s: float) -> Entry:
        """How this request may begin, once it may. ``may_relay``: it can start on a relay alone; ``must_relay``: it will use one even if
        main has everything, so the KV on its way there is worth waiting for."""
        prompt = self._prompt
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if prompt.leader is None:
                        prompt.leader = self
                    if prompt.leader is self:
                        return "lead"
                    if prompt.main is not None and not (must_relay and prompt.relay is None and prompt.relay_coming):
                        return "main"
                    if may_relay and prompt.relay is not None:
                        return "relay"
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return "alone"

    def when_main(self, callback: Callable[[], None]) -> None:
        """``callback`` is called once, when main has the KV or this request is to bring it there itself: at once if that is so already."""
        self._when_main = callback
        if self._prompt.leader is None:
            self._prompt.leader = self
        if self._prompt.main is not None or self._prompt.leader is self:
            self._open_main()

    def relay_is_coming(self, coming: bool) -> None:
        """Whether the leader's KV is on its way to a relay; what others say of theirs does not count."""
        if self._prompt.leader is self and self._prompt.relay_coming != coming:
            self._prompt.relay_coming = coming
            self._wake()

    def kv_at_relay(self, worker: str) -> None:
        if self._prompt.relay is None:
            self._prompt.relay = worker
            self._wake()

    def kv_at_main(self, worker: str) -> None:
        if self._prompt.main is None:
            self._prompt.main = worker
            for member in tuple(self._prompt.members):
                member._open_main()
            self._wake()

    def leave(self) -> None:
        """The request is over, or no longer takes part. Idempotent."""
        if self not in self._prompt.members:
            return
        self._when_main = self._when_joined = None
        self._prompt.members.remove(self)
        if not self._prompt.members:
            self._prompt.leader = None  # they refer to each other
            self._forget()
        elif self._prompt.leader is self:
            self._prompt.relay_coming = False
            self._prompt.leader = next((m for m in self._prompt.members if m._when_main is not None), None)
            if self._prompt.leader is not None:
                self._prompt.leader._open_main()
            self._wake()

    def _open_main(self) -> None:
        callback, self._when_main = self._when_main, None
        if callback is not None:
            callback()

    def _wake(self) -> None:
        for member in self._prompt.members:
            member._changed.set()
