"""Which accepted token ends a request. One function, run on every token wherever it came from, by the coordinator and by every worker."""

from __future__ import annotations

from collections.abc import Sequence

from pddbridge.sampling_params import FinishReason, SamplingParams


def finish_reason(params: SamplingParams, log_ids: Sequence[int]) -> FinishReason | None:
    """Why the request ends with the last token of ``log_ids`` (generated tokens only, the prompt never counts), or None if it goes on.

    "stop": the last token is in ``params.stop_set`` and more than ``min_tokens`` were generated, it included. "length": ``max_tokens`` were
    generated. A stop token at the length limit is a "stop". An empty log goes on. Stop strings are the text stream's business.
    """
    if not log_ids:
        return None
    if log_ids[-1] in params.stop_set and len(log_ids) > params.min_tokens:
        return "stop"
    return "length" if len(log_ids) >= params.max_tokens else None
