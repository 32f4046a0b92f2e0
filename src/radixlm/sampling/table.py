"""This module owns the sampling parameters of every row, and knows what a batch needs without asking the device.

The table is the host's. A batch that draws tokens needs fresh random numbers each step anyway, so its parameters travel
with them in one upload; a greedy batch uploads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from radixlm.base.plan import Join
from radixlm.base.request import LogprobParams

Index = npt.NDArray[np.int64]

#: Below this a repetition penalty would push scores out of the range of float32.
LEAST_REPETITION = 1e-4


class Need(IntFlag):
    """What has to be done for a row, beyond taking the best token."""

    DRAW = 1  # a token is drawn at random
    FILTER = 2  # top_k, top_p or min_p
    PENALTY = 4
    BIAS = 8
    MINIMUM = 16  # ids that end the text are forbidden for a while
    SCORES = 32  # log-probabilities of the chosen token
    PROMPT_SCORES = 64  # and of prompt tokens

    @property
    def adjusts(self) -> bool:
        """The scores that tokens are chosen by are not the model's."""
        return bool(self & (Need.PENALTY | Need.BIAS | Need.MINIMUM))


@dataclass(slots=True)
class RowLists:
    """What a row has any number of. `bias_ids`, `ending_ids` int64; `bias` float32."""

    bias_ids: Index
    bias: npt.NDArray[np.float32]
    ending_ids: Index
    logprobs: LogprobParams | None


_NO_LISTS = RowLists(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int64), None)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The sampled rows of a step, in order; n = their number.

    Attributes:
        rows, positions: [n]; the token after `positions - 1` is chosen, and will stand at `positions`.
        flags: [n] of `Need`.
        needs: all flags together.
    """

    table: SamplingTable
    rows: Index
    positions: Index
    flags: npt.NDArray[np.uint8]
    needs: Need

    def part(self, start: int, stop: int) -> Batch:
        flags = self.flags[start:stop]
        needs = Need(int(np.bitwise_or.reduce(flags, initial=0)))
        return Batch(self.table, self.rows[start:stop], self.positions[start:stop], flags, needs)

    def having(self, need: Need) -> Index:
        """Indices in the batch of the rows with this need."""
        return np.flatnonzero(self.flags & need)


class SamplingTable:
    """Parameters by row.

    Args:
        vocab_size: ids from here on are never chosen.
        eos_ids: the ids that end a text.
    """

    def __init__(self, rows: int, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self._eos_ids = eos_ids
        self.temperature = np.ones(rows)
        self.top_p = np.ones(rows)
        self.min_p = np.zeros(rows)
        self.top_k = np.full(rows, vocab_size, np.int64)
        self.frequency = np.zeros(rows)
        self.presence = np.zeros(rows)
        self.repetition = np.ones(rows)
        self.seed = np.zeros(rows, np.int64)
        self.prompt_len = np.zeros(rows, np.int64)
        self.free_from = np.zeros(rows, np.int64)  # first position at which the text may end
        self.lists: list[RowLists] = [_NO_LISTS] * rows
        self.flags = np.zeros(rows, np.uint8)

    def join(self, join: Join) -> None:
        """A sequence takes a row: its parameters replace those of the last one."""
        row, params = join.row, join.sampling
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        # No more than every id can be kept: a larger top_k is none.
        self.top_k[row] = min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size
        self.frequency[row] = params.frequency_penalty
        self.presence[row] = params.presence_penalty
        self.repetition[row] = max(params.repetition_penalty, LEAST_REPETITION)
        self.seed[row] = params.seed
        self.prompt_len[row] = join.prompt_len
        self.free_from[row] = join.prompt_len + params.min_new_tokens
        # An id in the padding is never chosen, so what is asked for it is done already.
        biases = [(token, bias) for token, bias in params.logit_bias if token < self.vocab_size]
        endings = {token for token in (*self._eos_ids, *params.stop_token_ids) if token < self.vocab_size}
        self.lists[row] = RowLists(
            bias_ids=np.array([token for token, _ in biases], np.int64),
            bias=np.array([bias for _, bias in biases], np.float32),
            ending_ids=np.array(sorted(endings), np.int64),
            logprobs=join.logprobs,
        )
        flags = Need(0)
        if not params.greedy:
            flags |= Need.DRAW
            if self.top_k[row] < self.vocab_size or params.top_p < 1.0 or params.min_p > 0.0:
                flags |= Need.FILTER
        if params.penalised:
            flags |= Need.PENALTY
        if biases:
            flags |= Need.BIAS
        if params.min_new_tokens > 0 and endings:
            flags |= Need.MINIMUM
        if join.logprobs is not None:
            flags |= Need.SCORES
            if join.logprobs.prompt_from >= 0:
                flags |= Need.PROMPT_SCORES
        self.flags[row] = flags

    def logprobs(self, row: int) -> LogprobParams:
        """What a row with `Need.SCORES` asked for."""
        asked = self.lists[row].logprobs
        assert asked is not None
        return asked

    def batch(self, rows: Index, positions: Index) -> Batch:
        """The rows whose tokens at `positions` are to be chosen."""
        flags = self.flags[rows]
        late = (flags & Need.MINIMUM != 0) & (positions >= self.free_from[rows])
        if late.any():
            flags[late] &= np.uint8(0xFF ^ Need.MINIMUM)
        return Batch(self, rows, positions, flags, Need(int(np.bitwise_or.reduce(flags, initial=0))))
