"""A client per request, over either door, in a thread of its own: asks, reads to the end or goes away, and keeps what it saw."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from pdd.chaos.bodies import grpc_body, http_body
from pdd.chaos.outcome import Outcome
from pdd.chaos.traffic import Ask
from pdd.topology import Address
from pddbridge.rpc.gen import common_pb2, inference_pb2, inference_pb2_grpc

_CONNECT_TRIES_S = 60.0
_CONNECT_PAUSE_S = 0.1
_RECONNECT = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))
_ORIGINS = {common_pb2.ORIGIN_RELAY: "relay", common_pb2.ORIGIN_MAIN: "main"}
_FINISH = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}
OnTokens = Callable[[Outcome], None]


class Client:
    """``run`` once, in a thread; ``on_tokens`` is called there after every piece. A request without an end after ``limit_s`` is hung."""

    def __init__(self, ask: Ask, http_door: Address, grpc_door: Address, on_tokens: OnTokens, limit_s: float) -> None:
        self.outcome = Outcome(ask.number)
        self._ask = ask
        self._http, self._grpc = http_door, grpc_door
        self._on_tokens = on_tokens
        self._limit_s = limit_s
        self._leave: Callable[[], object] | None = None
        self._lock = threading.Lock()
        self._left = self._too_late = False

    def run(self) -> None:
        """Never raises: whatever happens is in ``outcome``."""
        outcome, cancel = self.outcome, self._ask.cancel
        timers = [threading.Timer(self._limit_s, self._give_up)]
        if cancel is not None and cancel.after_s is not None:
            timers.append(threading.Timer(cancel.after_s, self._go))
        outcome.started_s = time.monotonic()
        for timer in timers:
            timer.daemon = True
            timer.start()
        try:
            if self._ask.door == "http":
                self._over_http()
            else:
                self._over_grpc()
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: half a line of JSON
            self._broke(f"{type(error).__name__}: {error}")
        finally:
            for timer in timers:
                timer.cancel()
        outcome.ended_s = time.monotonic()
        if self._left and outcome.end != "finished":
            outcome.end = "cancelled"
        if self._too_late:
            outcome.end = "hung"

    # --- going away

    def _go(self) -> None:
        with self._lock:
            self._left = True
            leave = self._leave
        if leave is not None:
            leave()

    def _give_up(self) -> None:
        self._too_late = True
        self._go()

    def _may_leave_by(self, leave: Callable[[], object]) -> None:
        with self._lock:
            self._leave = leave
            gone = self._left
        if gone:
            leave()

    def _came(self, ids: list[int], origin: str) -> None:
        self.outcome.arrived(time.monotonic(), ids, origin)
        self._on_tokens(self.outcome)
        cancel = self._ask.cancel
        if cancel is not None and cancel.after_tokens is not None and len(self.outcome.ids) >= cancel.after_tokens:
            self._go()

    def _ended(self, *, finish: str | None = None, code: str | None = None, message: str = "") -> None:
        self.outcome.num_ends += 1
        if finish is not None:
            self.outcome.end, self.outcome.finish_reason = "finished", finish
        else:
            self.outcome.end, self.outcome.code, self.outcome.message = "error", code, message

    def _broke(self, message: str) -> None:
        """The connection is gone. An answer that had ended by then has been received, but its end was not confirmed."""
        self.outcome.message = message
        if self.outcome.num_ends:
            self.outcome.num_ends += not self._left
        else:
            self.outcome.end = "broken"

    # --- doors

    def _over_http(self) -> None:
        connection = http.client.HTTPConnection(self._http.host, self._http.port)
        _connect(connection, lambda: self._left)
        sock = connection.sock
        assert sock is not None

        def leave() -> None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

        self._may_leave_by(leave)
        try:
            connection.request("POST", "/v1/completions", json.dumps(http_body(self._ask)), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                self._refused(response.status, response.read())
            elif self._ask.stream:
                self._read_events(_lines(response))
            else:
                self._read_whole(json.loads(response.read()))
        finally:
            connection.close()

    def _refused(self, status: int, body: bytes) -> None:
        try:
            error = json.loads(body)["error"]
            code, message = str(error["code"] or error["type"]), str(error["message"])
        except (ValueError, KeyError, TypeError):
            code, message = "", body.decode("utf-8", "replace")[:200]
        self._ended(code=code.upper() or str(status), message=f"{status}: {message}")

    def _read_events(self, lines: Iterator[bytes]) -> None:
        outcome, done = self.outcome, False
        for line in lines:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                done = True
                continue
            chunk = json.loads(line[len(b"data: ") :])
            if "error" in chunk:
                error = chunk["error"]
                self._ended(code=str(error["code"] or error["type"]).upper(), message=str(error["message"]))
                continue
            if chunk.get("usage"):
                outcome.usage_tokens = chunk["usage"]["completion_tokens"]
            outcome.timeline = (chunk.get("pdd") or {}).get("timeline") or outcome.timeline
            for choice in chunk["choices"]:
                outcome.text += choice["text"]
                said = choice.get("pdd") or {}
                if said.get("token_ids"):
                    self._came(list(said["token_ids"]), said["origin"])
                if choice["finish_reason"]:
                    self._ended(finish=choice["finish_reason"])
        if outcome.num_ends == 0 or (outcome.end == "finished" and not done):
            outcome.end = "silent"

    def _read_whole(self, body: dict[str, object]) -> None:
        choices, usage = body["choices"], body["usage"]
        assert isinstance(choices, list)
        assert isinstance(usage, dict)
        (choice,) = choices
        said = choice["pdd"]
        origins = [origin for origin, count in said["origins"] for _ in range(count)]
        self.outcome.text = choice["text"]
        self.outcome.timeline = said["timeline"] or {}
        self.outcome.usage_tokens = usage["completion_tokens"]
        for token_id, origin in zip(said["token_ids"], origins, strict=True):
            self.outcome.arrived(time.monotonic(), [token_id], origin)
        self._ended(finish=choice["finish_reason"])

    def _over_grpc(self) -> None:
        with grpc.insecure_channel(str(self._grpc), _RECONNECT) as channel:
            # Until there is a connection nothing has been asked; after that nothing is tried again.
            call = inference_pb2_grpc.InferenceStub(channel).Generate(grpc_body(self._ask), wait_for_ready=True)
            self._may_leave_by(call.cancel)
            try:
                for response in call:
                    self._read_response(response)
            except grpc.RpcError as error:
                self._call_failed(error)
                return
            if self.outcome.num_ends == 0:
                self.outcome.end = "silent"

    def _read_response(self, response: inference_pb2.GenerateResponse) -> None:
        self.outcome.text += response.text
        if response.tokens:
            self._came([record.token_id for record in response.tokens], _ORIGINS[response.origin])
        if response.finish_reason:
            self.outcome.usage_tokens = response.usage.completion_tokens
            self.outcome.timeline = {f.name: value for f, value in response.timeline.ListFields()}
            self._ended(finish=_FINISH[response.finish_reason])

    def _call_failed(self, error: grpc.RpcError) -> None:
        assert isinstance(error, grpc.Call)
        if self.outcome.num_ends:
            self._broke(error.details() or "")
        else:
            self._ended(code=error.code().name, message=error.details() or "")


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Raises IncompleteRead where the connection ends before the body: ``readline`` takes that for its end."""
    rest = b""
    while data := response.read1(65_536):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _connect(connection: http.client.HTTPConnection, gone: Callable[[], bool]) -> None:
    """A coordinator that is being started again refuses connections: nothing has been asked yet, so try again. Raises OSError."""
    deadline_s = time.monotonic() + _CONNECT_TRIES_S
    while True:
        try:
            connection.connect()
            return
        except ConnectionError:
            if gone() or time.monotonic() > deadline_s:
                raise
            time.sleep(_CONNECT_PAUSE_S)
