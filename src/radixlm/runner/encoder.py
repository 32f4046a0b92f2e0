"""This module owns the execution of plans by an encoder: a text is computed whole, by the step whose span ends it.

An encoder keeps no keys and values, so the pages that plans hand out are numbers that bound how much runs at once, and
a span that does not end its text computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixlm.base.facts import EngineFacts
from radixlm.base.plan import Floats, Join, Outcome, Plan
from radixlm.device.base import Device, Download
from radixlm.models.base import Encoder
from radixlm.runner.base import Masks
from radixlm.runner.pooling import part_of
from radixlm.sampling.sampler import NOT_FINITE, REASONS

#: Why a request for a text ends, should one get here.
NO_TEXT = "this model makes vectors of texts and continues none"

WARM_UP_TOKENS = 16


@dataclass(slots=True, eq=False)
class EncoderPending:
    """A step in flight: `spans` are those that end a text, in the order of the vectors on their way."""

    plan: Plan
    spans: list[int]
    download: Download | None

    def wait(self) -> Outcome:
        plan = self.plan
        failed = dict.fromkeys(np.flatnonzero(plan.samples).tolist(), NO_TEXT)
        vectors: dict[int, Floats] = {}
        if self.download is not None:
            (arrived,) = self.download.wait()
            for span, vector in zip(self.spans, arrived.numpy(), strict=True):
                if np.isfinite(vector).all():
                    vectors[span] = vector
                else:
                    failed[span] = REASONS[NOT_FINITE]
        return Outcome(plan.step, [0] * int(plan.samples.sum()), failed=failed, vectors=vectors)


class EncoderRunner:
    """Same interface as `runner.Runner`."""

    def __init__(self, model: Encoder, device: Device, facts: EngineFacts) -> None:
        self.facts = facts
        self._model = model
        self._device = device
        self._joins: dict[int, Join] = {}  # by row

    def forward(self, plan: Plan) -> EncoderPending:
        """Take in the plan and compute the texts that it ends."""
        for join in plan.joins:
            self._joins[join.row] = join
        ends = zip(plan.rows.tolist(), (plan.starts + plan.lengths).tolist(), strict=True)
        ending = [
            (span, self._joins[row])
            for span, (row, end) in enumerate(ends)
            if end == self._joins[row].prompt_len and self._joins[row].pooling is not None
        ]
        if not ending:
            return EncoderPending(plan, [], None)
        with torch.inference_mode():
            vectors = self._vectors([join for _, join in ending])
            return EncoderPending(plan, [span for span, _ in ending], self._device.download([vectors]))

    def sample(self, pending: EncoderPending, masks: Masks | None = None) -> None:
        """Nothing is ever sampled."""

    def warm_up(self) -> None:
        """Compute a short text, so that the first request does not wait for what is set up on first use."""
        length = min(WARM_UP_TOKENS, self.facts.model.context_length)
        with torch.inference_mode():
            self._model.forward(self._device.upload(np.zeros(length, np.int64)), [length])
        self._device.synchronise()

    def _vectors(self, joins: list[Join]) -> torch.Tensor:
        """[n, hidden_size] float32, as `Outcome.vectors` wants them: a mean is still a sum."""
        lengths = [join.prompt_len for join in joins]
        ids = np.concatenate([join.tokens[: join.prompt_len] for join in joins]).astype(np.int64)
        hidden = self._model.forward(self._device.upload(ids), lengths)
        parts = []
        for join, states in zip(joins, torch.split(hidden, lengths), strict=True):
            assert join.pooling is not None
            part = part_of(join.pooling, states, 0, join.prompt_len)
            assert part is not None, "every kind takes something from a whole text"
            parts.append(part)
        return torch.stack(parts)
