"""A sampler with rows in its tables, and rows of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from radixlm.base.plan import Join
from radixlm.base.sampling import SamplingParams
from radixlm.device.base import Device
from radixlm.device.cpu import CpuDevice
from radixlm.sampling.sampler import Sampled, Sampler
from radixlm.sampling.table import SamplingTable

EOS = 3

WISHES = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=11),
    SamplingParams(seed=12, temperature=0.2, top_p=0.9),
    SamplingParams(seed=13, temperature=2.5, top_p=0.97),  # cut far below the candidates
    SamplingParams(seed=14, top_k=50, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.7),
    SamplingParams(seed=15, frequency_penalty=1.5, presence_penalty=-0.5),
    SamplingParams(seed=16, logit_bias=((5, 100.0), (6, 99.0))),
    SamplingParams(temperature=0.0, min_new_tokens=100, stop_token_ids=(9,), max_new_tokens=200),
    SamplingParams(seed=17, temperature=1.2, top_k=400, top_p=0.5),
]


class Bench:
    """One row for each (params, prompt, output)."""

    def __init__(
        self,
        rows: Sequence[tuple[SamplingParams, Sequence[int], Sequence[int]]],
        vocab: int,
        device: Device | None = None,
    ) -> None:
        device = device or CpuDevice()
        longest = max(len(prompt) + len(output) for _, prompt, output in rows)
        tokens = torch.zeros(len(rows), longest + 1, dtype=torch.int32)
        self.table = SamplingTable(len(rows), vocab, (EOS,))
        self.known = np.zeros(len(rows), np.int64)
        for row, (params, prompt, output) in enumerate(rows):
            known = np.array([*prompt, *output], np.int32)
            tokens[row, : len(known)] = torch.from_numpy(known)
            tokens[row, len(known) :] = 7  # what an earlier sequence left behind
            self.table.join(Join(row, row, known, np.empty(0, np.int32), len(prompt), params))
            self.known[row] = len(known)
        self.sampler = Sampler(tokens.to(device.torch_device), vocab, device)

    def sample(self, logits: torch.Tensor, rows: Sequence[int] | None = None, **more: Any) -> Sampled:
        index = np.arange(len(self.known)) if rows is None else np.array(rows, np.int64)
        return self.sampler.sample(logits, self.table.batch(index, self.known[index]), **more)
