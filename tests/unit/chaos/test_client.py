"""Ends of a stream over real sockets: one that breaks, one that says nothing, one that is whole. A client must not take one for another."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from pdd.chaos.client import Client
from pdd.chaos.outcome import Outcome
from pdd.chaos.plan import draw_plan
from pdd.topology import Address

ASK = next(ask for seed in range(9) for ask in draw_plan(seed, 20, ("lean",)).asks if ask.door == "http" and ask.stream and not ask.cancel)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(data: object) -> bytes:
    line = b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


TOKEN = event({"choices": [{"text": "a", "finish_reason": None, "pdd": {"origin": "main", "token_ids": [99]}}]})
FINISH = event({"choices": [{"text": "", "finish_reason": "length"}], "usage": {"completion_tokens": 1}})
ERROR = event({"error": {"message": "main-0: gone", "type": "server_error", "code": "unavailable"}})
DONE, END = event(b"[DONE]"), b"0\r\n\r\n"


def answered(body: bytes) -> Outcome:
    """What a client makes of ``body``, after which the connection is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                received = b""
                while b'"pdd"' not in received:
                    received += connection.recv(65_536)
                connection.sendall(HEAD + body)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        address = Address("127.0.0.1", listener.getsockname()[1])
        client = Client(ASK, address, address, lambda _: None, limit_s=10.0)
        client.run()
        server.join()
    return client.outcome


@pytest.mark.parametrize(
    ("body", "end", "num_ends"),
    [
        (TOKEN + FINISH + DONE + END, "finished", 1),
        (TOKEN + ERROR + END, "error", 1),
        (TOKEN, "broken", 0),
        (TOKEN[:-9], "broken", 0),
        (TOKEN + END, "silent", 0),
        (TOKEN + DONE + END, "silent", 0),
        (TOKEN + FINISH + END, "silent", 1),
        (TOKEN + FINISH + FINISH + DONE + END, "finished", 2),
        (TOKEN + FINISH, "finished", 2),
    ],
)
def test_ends(body: bytes, end: str, num_ends: int) -> None:
    outcome = answered(body)
    assert (outcome.end, outcome.num_ends) == (end, num_ends)
    assert outcome.ids == ([99] if body.startswith(TOKEN) else [])
