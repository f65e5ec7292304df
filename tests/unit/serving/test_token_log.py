"""The law: position len(log) and nothing else, exactly once."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdd.serving.token_log import TokenLog, TokenLogError
from pddbridge.sampling_params import TokenRecord


class TokenLogMachine(RuleBasedStateMachine):
    """Two proposers send tokens of one true stream, late, early, repeated and wrong; the log only ever grows along the true stream."""

    def __init__(self) -> None:
        super().__init__()
        self.log = TokenLog()
        self.accepted: list[TokenRecord] = []
        self.duplicates = 0

    @staticmethod
    def true_token(position: int) -> int:
        return (position * 7 + 3) % 50

    @rule(back=st.integers(0, 5), logprob=st.floats(-9, 0))
    def propose_true(self, back: int, logprob: float) -> None:
        position = max(0, len(self.accepted) - back)
        record = TokenRecord(self.true_token(position), logprob)
        fresh = position == len(self.accepted)
        assert self.log.propose(position, record) is fresh
        if fresh:
            self.accepted.append(record)
        else:
            self.duplicates += 1

    @rule(ahead=st.integers(1, 5), token=st.integers(0, 49))
    def propose_gap(self, ahead: int, token: int) -> None:
        with pytest.raises(TokenLogError, match=f"expects position {len(self.accepted)}"):
            self.log.propose(len(self.accepted) + ahead, TokenRecord(token))

    @rule(back=st.integers(1, 5), offset=st.integers(1, 49))
    def propose_difference(self, back: int, offset: int) -> None:
        position = len(self.accepted) - back
        if position >= 0:
            with pytest.raises(TokenLogError, match=f"position {position}"):
                self.log.propose(position, TokenRecord((self.true_token(position) + offset) % 50))

    @rule(position=st.integers(-5, -1))
    def propose_before_the_start(self, position: int) -> None:
        with pytest.raises(TokenLogError):
            self.log.propose(position, TokenRecord(1))

    @invariant()
    def holds_the_first_record_of_each_position(self) -> None:
        assert list(self.log.records) == self.accepted
        assert list(self.log.ids) == [r.token_id for r in self.accepted]
        assert len(self.log) == len(self.accepted)
        assert self.log.num_duplicates == self.duplicates


TestTokenLog = TokenLogMachine.TestCase
