"""How the log moves from relay to main: the mode, the next chunk to ingest, when to seal, when to commit. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

HandoffMode = Literal["one_shot", "catch_up"]


@dataclass(frozen=True)
class HandoffSnapshot:
    """``log_tokens``: accepted so far · ``sent_tokens``: log prefix that main was given · ``ingesting``: main has yet to confirm the last
    chunk · ``relay_proposes``: the relay may still propose (alive, not sealed) · ``seal_sent``: it was asked to stop ·
    ``relay_stops_by_itself``: it was opened with a limit, so it seals without being asked ·
    ``behind_before``: how far behind main was when the last chunk was sent, None before the first.
    """

    log_tokens: int
    sent_tokens: int
    ingesting: bool
    relay_proposes: bool
    seal_sent: bool
    relay_stops_by_itself: bool
    behind_before: int | None


@dataclass(frozen=True)
class IngestChunk:
    """Give main ``log[position : position + num_tokens]``; it does not decode yet."""

    position: int
    num_tokens: int


@dataclass(frozen=True)
class SealRelay:
    """Ask the relay to stop after its step in flight."""


@dataclass(frozen=True)
class Commit:
    """Give main ``log[position:]`` and let it decode."""

    position: int


@dataclass(frozen=True)
class Wait:
    """Nothing to do until the next event."""


HandoffAction = IngestChunk | SealRelay | Commit | Wait


def choose_handoff(forced: HandoffMode | None, log_tokens: int, catch_up_chunk: int) -> HandoffMode:
    """``forced``: what the launch config or the client demands. Otherwise catch up when more than a chunk is behind."""
    if forced is not None:
        return forced
    return "catch_up" if log_tokens > catch_up_chunk else "one_shot"


def next_action(mode: HandoffMode, catch_up_chunk: int, snapshot: HandoffSnapshot) -> HandoffAction:
    """The next thing to do once main's prompt KV is complete. Call again after every event and after every action that is not Wait.

    One-shot: seal, then commit everything. Catch-up: while more than a chunk is behind, ingest a chunk and let the relay run on; one chunk
    in flight at a time, so that main's neighbours see at most that much. A round that brought main no nearer ends the catching up: the
    relay is faster and would run on for ever. After the seal nobody is waited for but main: what is left goes at once, in chunks.
    """
    behind = snapshot.log_tokens - snapshot.sent_tokens
    if mode == "catch_up" and behind > catch_up_chunk:
        if snapshot.ingesting and snapshot.relay_proposes:
            return Wait()
        no_nearer = snapshot.behind_before is not None and behind >= snapshot.behind_before
        if no_nearer and snapshot.relay_proposes and not (snapshot.seal_sent or snapshot.relay_stops_by_itself):
            return SealRelay()
        return IngestChunk(snapshot.sent_tokens, catch_up_chunk)
    if not snapshot.relay_proposes:
        return Commit(snapshot.sent_tokens)
    if snapshot.ingesting or snapshot.seal_sent or snapshot.relay_stops_by_itself:
        return Wait()
    return SealRelay()
