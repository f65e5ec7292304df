"""What a worker refuses before it takes a request, and the command it makes of the rest. Pure but for the clock it is given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pdd.errors import Code, PddError
from pdd.worker.kv_links import LINK_CHOICES
from pdd.worker.messages import OpenRequest, PushTo
from pdd.worker.transfers import PushSpec
from pddbridge.engine import MAX_SCORE_LOGPROBS
from pddbridge.kv_spec import TokenRange
from pddbridge.rpc.convert import check_token_ids, params_from_proto, priority_from_proto
from pddbridge.rpc.gen import worker_pb2


@dataclass(frozen=True)
class Opening:
    """``pushes`` lack something; ``complete_targets`` lack nothing."""

    command: OpenRequest
    pushes: tuple[PushSpec, ...]
    complete_targets: tuple[str, ...]


# Where each worker of the topology receives, as seen from here; None: KV may be pushed anywhere.
Receivers = Mapping[str, tuple[tuple[str, int], ...]] | None


def parse_open(message: worker_pb2.Open, vocab_size: int, max_context_tokens: int, receivers: Receivers, now: float) -> Opening:
    """Raises PddError INVALID_ARGUMENT naming field, value and what is allowed. ``now``: monotonic seconds, deadlines count from it."""
    try:
        return _parse(message, vocab_size, max_context_tokens, receivers, now)
    except ValueError as error:
        raise PddError(Code.INVALID_ARGUMENT, str(error)) from error


def _parse(message: worker_pb2.Open, vocab_size: int, max_context_tokens: int, receivers: Receivers, now: float) -> Opening:
    if not message.request_id:
        raise ValueError("request_id: empty")
    if not message.prompt_ids:
        raise ValueError("prompt_ids: empty, at least one token is needed")
    num_tokens = len(message.prompt_ids) + len(message.log_ids)
    if num_tokens > max_context_tokens:
        raise ValueError(f"prompt_ids and log_ids: given {num_tokens} tokens, this worker's context is {max_context_tokens}")
    check_token_ids(message.prompt_ids, vocab_size, "prompt_ids")
    check_token_ids(message.log_ids, vocab_size, "log_ids")
    if not (math.isfinite(message.timeout_s) and message.timeout_s > 0):
        raise ValueError(f"timeout_s: given {message.timeout_s}, must be finite and above 0")
    if message.kv_source not in (worker_pb2.KV_SOURCE_COMPUTE, worker_pb2.KV_SOURCE_TRANSFER):
        raise ValueError(f"kv_source: given {message.kv_source}, allowed COMPUTE or TRANSFER")
    prompt_logprobs = message.prompt_logprobs if message.HasField("prompt_logprobs") else None
    if prompt_logprobs is not None and message.kv_source != worker_pb2.KV_SOURCE_COMPUTE:
        raise ValueError("prompt_logprobs: given with kv_source TRANSFER, allowed with COMPUTE: what is received is not scored")
    if prompt_logprobs is not None and prompt_logprobs > MAX_SCORE_LOGPROBS:
        raise ValueError(f"prompt_logprobs: given {prompt_logprobs}, allowed up to {MAX_SCORE_LOGPROBS}")
    pushes, complete = _parse_targets(message, receivers)
    command = OpenRequest(
        request_id=message.request_id,
        tenant=message.tenant,
        prompt_ids=tuple(message.prompt_ids),
        log_ids=tuple(message.log_ids),
        params=params_from_proto(message.sampling, vocab_size),
        transfer=message.kv_source == worker_pb2.KV_SOURCE_TRANSFER,
        decode=message.decode,
        max_propose_tokens=message.max_propose_tokens if message.HasField("max_propose_tokens") else None,
        push_to=tuple(PushTo(push.target, push.tokens.start) for push in pushes),
        deadline=now + message.timeout_s,
        prompt_logprobs=prompt_logprobs,
    )
    return Opening(command, pushes, complete)


def parse_target(to: worker_pb2.PushTarget, prompt_tokens: int, receivers: Receivers) -> PushSpec | None:
    """One more receiver for a request of ``prompt_tokens``; None: it lacks nothing. Raises ValueError."""
    return _parse_target(to, "add_target", prompt_tokens - 1, receivers)


def _parse_targets(message: worker_pb2.Open, receivers: Receivers) -> tuple[tuple[PushSpec, ...], tuple[str, ...]]:
    stop = len(message.prompt_ids) - 1
    pushes: list[PushSpec] = []
    complete: list[str] = []
    for index, to in enumerate(message.push_to):
        if to.target in {push.target for push in pushes} | set(complete):
            raise ValueError(f"push_to[{index}].target: {to.target!r} given twice")
        push = _parse_target(to, f"push_to[{index}]", stop, receivers)
        if push is None:
            complete.append(to.target)
        else:
            pushes.append(push)
    return tuple(pushes), tuple(complete)


def _parse_target(to: worker_pb2.PushTarget, field: str, stop: int, receivers: Receivers) -> PushSpec | None:
    """``stop``: of the positions to be sent. None: ``to`` lacks nothing."""
    if to.first_token > stop:
        raise ValueError(f"{field}.first_token: given {to.first_token}, allowed 0 to {stop}")
    if to.first_token == stop:
        return None
    if to.transfer_id == 0:
        raise ValueError(f"{field}.transfer_id: given 0, but tokens from {to.first_token} to {stop} are to be sent")
    if not (to.host and 0 < to.port < 65536):
        raise ValueError(f"{field}: given host {to.host!r} port {to.port}, a host and a port from 1 to 65535 are needed")
    if receivers is not None and (to.host, to.port) not in receivers.get(to.target, ()):
        known = sorted(f"{name} at {host}:{port}" for name, addresses in receivers.items() for host, port in addresses)
        raise ValueError(f"{field}: given {to.target!r} at {to.host}:{to.port}, the topology has {known}")
    if (link := to.link or "tcp") not in LINK_CHOICES:
        raise ValueError(f"{field}.link: given {to.link!r}, allowed {list(LINK_CHOICES)}")
    deadline_s = to.deadline_s if to.HasField("deadline_s") else None
    if deadline_s is not None and not math.isfinite(deadline_s):
        raise ValueError(f"{field}.deadline_s: given {deadline_s}, must be finite")
    where = (to.target, to.host, to.port, to.epoch, to.transfer_id)
    priority = priority_from_proto(to.priority, f"{field}.priority")
    return PushSpec(*where, TokenRange(to.first_token, stop), link, to.nixl_port, priority, deadline_s)
