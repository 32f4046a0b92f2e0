"""This module owns how hidden states become the vector of a text: which rows want one, what each span adds to it."""

from __future__ import annotations

import torch

from radixlm.base.plan import Join, Plan
from radixlm.base.request import PoolingKind


class Pooler:
    """The rows that ask for a vector."""

    def __init__(self) -> None:
        self._wanted: dict[int, tuple[PoolingKind, int]] = {}  # row -> kind, length of the prompt

    def join(self, join: Join) -> None:
        """A sequence takes a row: what the last one there wanted is forgotten."""
        if join.pooling is not None:
            self._wanted[join.row] = (join.pooling, join.prompt_len)
        elif self._wanted:
            self._wanted.pop(join.row, None)

    def pool(self, plan: Plan, hidden: torch.Tensor) -> tuple[list[int], torch.Tensor] | None:
        """What the spans of a step add to the vectors of their rows (see `Outcome.vectors`).

        Args:
            hidden: [T, hidden_size], the spans' states laid end to end.

        Returns:
            Spans and their parts [n, hidden_size] float32, or None if no span has one.
        """
        if not self._wanted:
            return None
        spans, parts, offset = [], [], 0
        steps = zip(plan.rows.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True)
        for span, (row, start, length) in enumerate(steps):
            wanted = self._wanted.get(row)
            if wanted is not None:
                part = part_of(wanted[0], hidden[offset : offset + length], start, wanted[1])
                if part is not None:
                    spans.append(span)
                    parts.append(part)
            offset += length
        return (spans, torch.stack(parts)) if parts else None


def part_of(kind: PoolingKind, states: torch.Tensor, start: int, prompt_len: int) -> torch.Tensor | None:
    """What the states [n, hidden_size] of positions `start ..` add to the vector, float32; None for nothing."""
    if kind == "mean":
        return states[: prompt_len - start].sum(dim=0, dtype=torch.float32)
    at = prompt_len - 1 if kind == "last" else 0
    return states[at - start].float() if start <= at < start + len(states) else None
