"""The one "token accepted" function: every token of a request goes through it, whoever proposed it."""

from __future__ import annotations

from pdd.serving.request import Delta, GenerationRequest, Origin
from pdd.serving.text.model import TextModel
from pdd.serving.text.stream import TextStream
from pdd.serving.token_log import TokenLog
from pddbridge.sampling_params import FinishReason, TokenRecord
from pddbridge.stops import finish_reason


class Acceptor:
    """Owns a request's log, its text and its end. ``finish_reason`` is None while the request runs."""

    def __init__(self, request: GenerationRequest, text_model: TextModel | None) -> None:
        """Raises ValueError when the request wants text and there is no text model."""
        if request.want_text and text_model is None:
            raise ValueError(f"request {request.request_id}: text is wanted, but no text model is loaded")
        self.log = TokenLog()
        self.finish_reason: FinishReason | None = None
        self._params = request.sampling
        self._text: TextStream | None = None
        if request.want_text and text_model is not None:
            self._text = TextStream(
                text_model,
                request.prompt_ids,
                request.stop_strings,
                request.sampling.min_tokens,
                with_special=request.with_special,
                include_stop=request.include_stop,
            )
        self._text_offset = 0

    def accept(self, position: int, record: TokenRecord, origin: Origin) -> Delta | None:
        """Returns what the client gets for this token, None for a repeated one. After the end nothing is accepted.

        A stop id's text is not shown; a stop string wins over the length limit. Raises TokenLogError (see TokenLog.propose).
        """
        if self.finish_reason is not None or not self.log.propose(position, record):
            return None
        reason = finish_reason(self._params, self.log.ids)
        text = ""
        if self._text is not None:
            step = self._text.push(record.token_id, ends=reason == "stop")
            text = step.text
            if step.stopped:
                reason = "stop"
            elif reason is not None:
                text += self._text.finish()
        self.finish_reason = reason
        delta = Delta((record,), text, self._text_offset, origin, reason)
        self._text_offset += len(text)
        return delta
