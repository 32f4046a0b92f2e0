"""This module owns the two values the scheduler and the runner exchange: `Plan` (what a step will do), `Outcome` (what
came back).

The runner mirrors device tables from plans alone: a token table [row, position], a page table [row, page index] and the
sampling parameters of each row. A plan is applied in this order: `joins`, page and token writes, then the spans are
computed.
Steps run on the device in plan order, which is what makes it safe for a later plan to reuse a row or page that an
earlier one still reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from radixlm.base.request import LogprobParams, PoolingKind
from radixlm.base.sampling import SamplingParams

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

NO_INTS: Ints = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """A sequence takes a row. Everything the device must know of it, once.

    Attributes:
        row: its place in the device tables, `0 <= row < max_running`.
        tokens: all tokens known so far: the prompt, and on resumption what was already generated.
        pages: the pages it holds for tokens that are already computed (its prefix), from page index 0.
        prompt_len: how many of `tokens` the client sent; later ones count as output (penalties, `min_new_tokens`).
    """

    row: int
    uid: int
    tokens: Ints
    pages: Ints
    prompt_len: int
    sampling: SamplingParams
    logprobs: LogprobParams | None = None
    pooling: PoolingKind | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """Spans whose rows have the same pages in front.

    Attributes:
        spans: [n] indices of spans of the plan, n >= 2.
        length: leading tokens that lie in the same pages: a multiple of the page size, at most the smallest of their
            `starts`.
    """

    spans: Ints
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One forward pass, frozen. Arrays of one entry per span share their index: span i computes tokens
    `[starts[i], starts[i] + lengths[i])` of row `rows[i]`, whose attention sees positions up to
    `starts[i] + lengths[i] - 1`.

    Attributes:
        samples: span i reaches the last known token, so the token after it is sampled and written at
            `(rows[i], starts[i] + lengths[i])` of the token table.
        page_rows, page_index, page_ids: page-table writes, `table[page_rows[j], page_index[j]] = page_ids[j]`: new
            pages of growing rows and canonical pages that replace duplicates. Applied after `joins`, in order.
        shared: of the decode spans (see `decodes`), those that share a prefix; each span is in one group at most. A
            hint: attention may read the keys and values of a shared prefix once for all spans of its group, and the
            results are the same. As long as the groups stay the same, it is the same object from plan to plan.
        token_rows, token_positions, token_ids: token-table writes: tokens that were not sampled but forced. Applied
            after `joins`; each place once.
        wants_history: what may be sampled depends on tokens that are still being sampled: everything in flight has to
            be settled between this plan's forward pass and its sampling.
    """

    step: int
    rows: Ints
    starts: Ints
    lengths: Ints
    samples: Bools
    joins: tuple[Join, ...] = ()
    page_rows: Ints = field(default_factory=lambda: NO_INTS)
    page_index: Ints = field(default_factory=lambda: NO_INTS)
    page_ids: Ints = field(default_factory=lambda: NO_INTS)
    shared: tuple[SharedPrefix, ...] = ()
    token_rows: Ints = field(default_factory=lambda: NO_INTS)
    token_positions: Ints = field(default_factory=lambda: NO_INTS)
    token_ids: Ints = field(default_factory=lambda: NO_INTS)
    wants_history: bool = False

    @property
    def decode(self) -> bool:
        """Every span is one token long: the shape that graphs are captured for."""
        return len(self.rows) == int(self.lengths.sum())

    @property
    def decodes(self) -> int:
        """How many spans at the front are one token long. In a mixed step they come first."""
        longer = self.lengths > 1
        return int(longer.argmax()) if longer.any() else len(longer)


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Raw log-probabilities of tokens at consecutive positions of one row. n = number of positions.

    Attributes:
        position: of the first scored token.
        chosen: [n] log-probability of the token that is there.
        top_ids, top: [n, k] the k most probable, best first (k may be 0).
        picked: [n, len(token_ids)] of the ids asked for (maybe empty).
    """

    position: int
    chosen: Floats
    top_ids: Ints
    top: Floats
    picked: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What one step produced.

    Attributes:
        tokens: one sampled id for each span with `samples`, in span order.
        scores: span index -> scores of its sampled token, for rows that asked.
        prompt_scores: span index -> scores of the prompt tokens that this span computed the logits for: positions
            `max(prompt_from, starts + 1) .. starts + lengths` that are still prompt.
        failed: span index -> reason, for spans whose logits are not finite. Their entry in `tokens` means nothing.
        vectors: span index -> [hidden_size] float32, for rows with `pooling`: what this span adds to the row's vector.
            Of a mean it is the sum of the span's hidden states; of a single state the span that has it says it.
    """

    step: int
    tokens: list[int]
    scores: dict[int, TokenScores] = field(default_factory=dict)
    prompt_scores: dict[int, TokenScores] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    vectors: dict[int, Floats] = field(default_factory=dict)
