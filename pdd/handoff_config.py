"""How relays hand over: the thresholds of the launch config's ``policy.handoff_rules``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pdd.strict_model import StrictModel


class HandoffConfig(StrictModel):
    """For ``policy.handoff: auto``. ``crowded_share``: of a relay's rows; from there on it is sealed as soon as can be ·
    ``crowded_gap_s``: unless that would leave a longer gap: then main catches up first · ``hidden_itls``: a gap of up to so many ITLs, as
    they are as a rule, does not show, and needs no overlap.

    Of overlaps. ``max_tokens``: of the relay while main decodes too; then the relay is sealed, even if a gap is left · ``max_gap_s``: not
    if it were longer than this: the relay then goes on until main is faster or the request ends · ``pace``: once main decodes too the
    reader gets tokens at most so many ITLs apart, so that what is held back covers main's delay; before that no slower than is usual; 1:
    nothing is held back · ``max_cover_s``: that is held back at most. The end of an answer is never held back.
    """

    crowded_share: Annotated[float, Field(gt=0, le=1)] = 0.75
    crowded_gap_s: Annotated[float, Field(ge=0)] = 0.5
    hidden_itls: Annotated[float, Field(ge=0)] = 1.5
    max_tokens: Annotated[int, Field(ge=1)] = 64
    max_gap_s: Annotated[float, Field(gt=0)] = 2.0
    pace: Annotated[float, Field(ge=1, le=4)] = 1.25
    max_cover_s: Annotated[float, Field(ge=0)] = 1.0
