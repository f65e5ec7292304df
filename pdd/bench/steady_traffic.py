"""Mixed traffic against a running endpoint, from clients that each ask one thing after another. Owns what is asked, and in which mix."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from dataclasses import dataclass, field

from pdd.launch.ask import AskError, Piece, ask

_WORDS = (
    "harbour",
    "lantern",
    "orchard",
    "river",
    "signal",
    "copper",
    "meadow",
    "winter",
    "archive",
    "engine",
    "paper",
    "garden",
    "window",
)
_MAX_ERRORS = 20


@dataclass(frozen=True)
class Sizes:
    """Of prompts and answers, at most. ``vocab_size``: prompts of ids take the upper half, where no special token is."""

    words: int
    prompt_tokens: int
    answer_tokens: int
    vocab_size: int


class EnoughReadError(Exception):
    """A client that has read enough."""


@dataclass
class Tally:
    """``done`` by kind of request; ``errors``: messages, the first few."""

    done: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    errors: list[str] = field(default_factory=list)


class Traffic:
    """``clients`` threads that ask until ``stop``; ``start`` once."""

    def __init__(self, url: str, model: str, sizes: Sizes, clients: int, pause_s: float, seed: int) -> None:
        self.tally = Tally()
        self._url, self._model, self._sizes, self._pause_s = url, model, sizes, pause_s
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._client, args=(seed + i,), name=f"client-{i}", daemon=True) for i in range(clients)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """No further requests; wait for those under way. False when one still runs after ``timeout_s`` each."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _client(self, seed: int) -> None:
        rng = random.Random(seed)
        conversation = Conversation(rng, self._sizes)
        while not self._stopping.is_set():
            kind, path, body, read_pieces = conversation.next()
            body = {"model": self._model, "temperature": 0.0, **body}
            try:
                tokens = self._ask(path, body, read_pieces)
                with self._lock:
                    self.tally.done[kind] += 1
                    self.tally.tokens += tokens
            except AskError as error:
                with self._lock:
                    if len(self.tally.errors) < _MAX_ERRORS:
                        self.tally.errors.append(f"{kind}: {error}")
            self._stopping.wait(rng.expovariate(1 / self._pause_s))

    def _ask(self, path: str, body: dict[str, object], read_pieces: int | None) -> int:
        seen = 0

        def on_piece(piece: Piece) -> None:
            nonlocal seen
            seen += piece.num_tokens
            if read_pieces is not None and seen >= read_pieces:
                raise EnoughReadError

        with contextlib.suppress(EnoughReadError):  # leaving the stream is what such a client came for
            ask(f"{self._url}{path}", body, on_piece)
        return seen


class Conversation:
    """What one client asks next: (kind, path, body, after how many tokens it leaves or None)."""

    def __init__(self, rng: random.Random, sizes: Sizes) -> None:
        self._rng, self._sizes = rng, sizes
        self._ids: list[int] = []

    def next(self) -> tuple[str, str, dict[str, object], int | None]:
        rng, sizes = self._rng, self._sizes
        max_tokens = rng.randint(max(1, sizes.answer_tokens // 4), sizes.answer_tokens)
        kind = rng.choices(("chat", "ids", "turn", "sampled", "choices", "cancelled"), (3, 3, 4, 2, 1, 2))[0]
        match kind:
            case "chat":
                return kind, "/v1/chat/completions", {"messages": self._messages(sizes.words), "max_tokens": max_tokens}, None
            case "ids":
                ids = self._fresh(rng.randint(2, sizes.prompt_tokens))
                return kind, "/v1/completions", {"prompt": ids, "max_tokens": max_tokens}, None
            case "turn":  # the prompt before and some more
                if len(self._ids) > sizes.prompt_tokens * 3 // 4:
                    self._ids = []
                self._ids = [*self._ids, *self._fresh(max(2, sizes.prompt_tokens // 6))]
                return kind, "/v1/completions", {"prompt": self._ids, "max_tokens": max_tokens}, None
            case "sampled":
                settings = {"temperature": 0.9, "top_p": 0.9, "seed": rng.randrange(2**31), "frequency_penalty": 0.3, "logprobs": True}
                body = {"messages": self._messages(sizes.words // 2), "max_tokens": max_tokens, "top_logprobs": 3, **settings}
                return kind, "/v1/chat/completions", body, None
            case "choices":
                body = {"messages": self._messages(sizes.words // 2), "max_tokens": max_tokens, "n": 2, "temperature": 0.7}
                return kind, "/v1/chat/completions", body, None
            case _:
                body = {"messages": self._messages(sizes.words), "max_tokens": sizes.answer_tokens}
                return kind, "/v1/chat/completions", body, rng.randint(1, max(1, sizes.answer_tokens // 2))

    def _messages(self, most: int) -> list[dict[str, str]]:
        words = self._rng.choices(_WORDS, k=self._rng.randint(1, max(1, most)))
        return [{"role": "user", "content": " ".join(words)}]

    def _fresh(self, count: int) -> list[int]:
        return [self._rng.randrange(self._sizes.vocab_size // 2, self._sizes.vocab_size) for _ in range(count)]
