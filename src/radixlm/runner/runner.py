"""This module owns the execution of plans on one device: row tables, KV pool and model, from plan to step in flight.

A step that cannot get its memory fails for the sequences in it and for nobody else: the tables have taken in the plan
before anything is computed, so the next plan finds them as it expects.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from radixlm.attention.base import AttentionBackend, Step, StepInputs
from radixlm.attention.tiles import Tiling
from radixlm.base.facts import EngineFacts
from radixlm.base.plan import Join, Outcome, Plan
from radixlm.base.sampling import SamplingParams
from radixlm.device.base import Device
from radixlm.memory.pool import KVPool
from radixlm.memory.table import RowTables
from radixlm.models.base import Model
from radixlm.runner.base import Masks
from radixlm.runner.inputs import InputBuilder
from radixlm.runner.pending import Asked, PendingStep
from radixlm.runner.pooling import Pooler
from radixlm.sampling.logprobs import Scorer
from radixlm.sampling.sampler import Sampler
from radixlm.sampling.table import Need, SamplingTable

if TYPE_CHECKING:
    from radixlm.runner.graphs import DecodeGraphs

#: Tokens of the warm-up prompt, or fewer if the pool is smaller.
WARM_UP_TOKENS = 16


class Runner:
    """
    Args:
        extend, decode: attention backends of steps with longer spans, and of steps where every span is one token.
        facts: `facts.pool` and `facts.model` must describe `pool` and `model`. With `facts.shared_prefix`, `decode` is
            told of the prefixes that rows share.
        graphs: decode steps run as captured graphs; `pool` has then one page more than `facts.pool`, for padding.
    """

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        extend: AttentionBackend,
        decode: AttentionBackend,
        device: Device,
        facts: EngineFacts,
        graphs: bool = False,
    ) -> None:
        self.facts = facts
        self._model = model
        self._pool = pool
        self._extend = extend
        self._decode = decode
        self._device = device
        rows, vocab = facts.pool.max_running, facts.model.sampled_vocab_size
        # A captured step pads its batch with a row of its own.
        self._tables = RowTables(rows + graphs, facts.model.context_length, pool.page_size, device)
        tiling = Tiling.of(model.layers, facts.device.cores) if facts.shared_prefix else None
        self._inputs = InputBuilder(self._tables, device, tiling)
        self._sampling = SamplingTable(rows, vocab, facts.model.eos_ids)
        self._sampler = Sampler(self._tables.tokens, vocab, device)
        self._scorer = Scorer(vocab, device)
        self._pooler = Pooler()
        self._graphs: DecodeGraphs | None = None
        if graphs:
            from radixlm.runner.graphs import DecodeGraphs

            self._graphs = DecodeGraphs(model, pool, decode, self._tables, self._sampler, device, tiling)

    def forward(self, plan: Plan) -> PendingStep:
        """Take in the plan and queue the forward pass. On a CPU it is done on return."""
        self._tables.apply(plan)
        for join in plan.joins:
            self._sampling.join(join)
            self._pooler.join(join)
        spans = np.flatnonzero(plan.samples)
        rows, ends = plan.rows[spans].astype(np.int64), (plan.starts + plan.lengths)[spans].astype(np.int64)
        pending = PendingStep(plan, spans, self._sampling.batch(rows, ends))
        with torch.inference_mode(), _contained(pending):
            if self._graphs is not None:
                if self._graphs.fits(plan):
                    replayed = self._graphs.replay(plan)
                    pending.logits, pending.best = replayed.logits, replayed.best
                    return pending
                self._graphs.forget()
            inputs = self._inputs.build(plan)
            backend = self._decode if plan.decode else self._extend
            step = Step(inputs, self._model.layers, self._pool, backend)
            hidden = self._model.forward(inputs.ids, inputs.positions, step)
            self._score_prompts(pending, hidden)
            pending.pooled = self._pooler.pool(plan, hidden)
            if len(spans):
                pending.logits = self._model.head(_rows(hidden, inputs))
        return pending

    def sample(self, pending: PendingStep, masks: Masks | None = None) -> None:
        """Choose the next tokens, write them to the token table, start to fetch the outcome."""
        with torch.inference_mode(), _contained(pending):
            if pending.broken is not None:
                return
            if pending.logits is None:
                pending.logits = torch.empty(0, self._model.vocab_size, device=self._device.torch_device)
            places = {span: i for i, span in enumerate(pending.spans.tolist())} if masks else {}
            allowed = {places[span]: words for span, words in (masks or {}).items() if span in places}
            batch = pending.batch
            greedy = pending.best is not None and not allowed and not batch.needs & ~Need.SCORES
            if greedy and pending.best is not None:
                sampled = pending.best  # chosen and written within the captured step
            else:
                sampled = self._sampler.sample(pending.logits, batch, allowed)
            if len(batch.rows) and not greedy:
                where = self._device.upload(self._tables.token_places(batch.rows, batch.positions))
                self._tables.write_tokens(where, sampled.tokens)
            if batch.needs & Need.SCORES:
                self._score(pending, pending.logits, sampled.tokens)
            pending.logits = None
            pending.download = self._device.download(pending.tensors(sampled))

    def execute(self, plan: Plan) -> Outcome:
        """Run one plan by itself, from beginning to end."""
        pending = self.forward(plan)
        self.sample(pending)
        return pending.wait()

    def warm_up(self) -> None:
        """Run an extend and a decode step, so that the first request does not wait for what is set up on first use.

        To be called before any plan: it writes to row 0 and to the first pages.
        """
        page_size = self._pool.page_size
        length = min(WARM_UP_TOKENS, self.facts.pool.tokens - 1, self.facts.model.context_length - 1)
        pages = np.arange(-(-(length + 1) // page_size), dtype=np.int32)
        join = Join(0, 0, np.zeros(length, np.int32), pages, length, SamplingParams(temperature=0.0))
        for step, (start, count) in enumerate(((0, length), (length, 1))):
            if count > 0:
                plan = Plan(
                    step=step,
                    rows=np.zeros(1, np.int32),
                    starts=np.array([start], np.int32),
                    lengths=np.array([count], np.int32),
                    samples=np.ones(1, np.bool_),
                    joins=(join,) if start == 0 else (),
                )
                self.execute(plan)
        self._device.synchronise()

    # ---- log-probabilities

    def _score(self, pending: PendingStep, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Queue the scores of the sampled tokens of the rows that ask for them."""
        batch = pending.batch
        index = batch.having(Need.SCORES)
        params = [batch.table.logprobs(row) for row in batch.rows[index].tolist()]
        here = self._device.upload(index)
        scored = self._scorer.score(lambda start, stop: logits[here[start:stop]], tokens[here], params)
        spans, positions = pending.spans[index].tolist(), batch.positions[index].tolist()
        everybody = [
            Asked(span, slice(i, i + 1), position, asked)
            for i, (span, position, asked) in enumerate(zip(spans, positions, params, strict=True))
        ]
        pending.scores.append((everybody, scored))

    def _score_prompts(self, pending: PendingStep, hidden: torch.Tensor) -> None:
        """Queue the scores of the prompt tokens that follow the hidden states [T, hidden_size] of each span."""
        plan, table = pending.plan, self._sampling
        spans = np.flatnonzero(
            (table.flags[plan.rows] & Need.PROMPT_SCORES != 0) & (plan.starts < table.prompt_len[plan.rows])
        )
        offsets = plan.lengths.cumsum() - plan.lengths
        for span in spans.tolist():
            row, start, length = (int(array[span]) for array in (plan.rows, plan.starts, plan.lengths))
            params = table.logprobs(row)
            first = max(params.prompt_from, start + 1)
            stop = min(start + length + 1, int(table.prompt_len[row]))
            # A prompt of one token has no score, which is an answer too.
            if first < stop or first == stop == 1:
                positions = np.arange(first, stop)
                places = self._tables.token_places(np.full(len(positions), row, np.int64), positions)
                tokens = self._tables.read_tokens(self._device.upload(places))
                states = hidden[int(offsets[span]) + first - 1 - start :]
                scored = self._scorer.score(partial(self._head_of, states), tokens, [params])
                pending.prompt_scores.append(([Asked(span, slice(None), first, params)], scored))

    def _head_of(self, states: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return self._model.head(states[start:stop])


def _rows(hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
    """The hidden states that go through the head: `select` of [T, hidden_size]."""
    if inputs.decode and len(inputs.select) == len(hidden):
        return hidden
    return hidden.index_select(0, inputs.select)


@contextmanager
def _contained(pending: PendingStep) -> Iterator[None]:
    """Turn an allocation that failed into a failure of the step."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        pending.logits = None
        pending.broken = (
            f"not enough memory for a step of {int(pending.plan.lengths.sum())} tokens: "
            "lower --chunked-prefill-size or --max-total-tokens"
        )


def _out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The CPU allocator has no exception class of its own.
    text = str(error)
    return "DefaultCPUAllocator" in text or "not enough memory" in text
