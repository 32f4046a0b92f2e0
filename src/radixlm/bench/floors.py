"""This module owns the floor of a step: what the machine can do, measured, and the least that a step must do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from radixlm.base.facts import ModelFacts
from radixlm.base.plan import Plan

if TYPE_CHECKING:
    import torch

    from radixlm.device.base import Device

SECONDS = 0.5  # how long each ceiling is measured
LEAST, MOST = 64 << 20, 1 << 30  # bytes read to measure bandwidth
SIDE = 4096  # of the square matrices whose product is timed


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best this machine did just now: bytes read a second, and floating-point operations a second in a dtype."""

    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class Work:
    """The least a step does: bytes read from memory and floating-point operations."""

    bytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        """The floor: reading and computing at their ceilings, at the same time."""
        return max(self.bytes / ceilings.bandwidth, self.flops / ceilings.flops)


def work(model: ModelFacts, plan: Plan) -> Work:
    """The least work of a step.

    Every weight is read once and multiplied with every token (two operations each), except the output head, which sees
    the sampled tokens only. The KV before a span is read once; attention does four operations for each pair of tokens
    and each unit of the hidden size. Activations, the KV written and sampling are not counted. A model whose embedding
    is not tied to its head reads and multiplies a little less than this says: a step only looks rows up in it. A
    mixture of experts does far less: a token multiplies with the experts it goes to, and a step reads those alone.
    """
    starts, lengths = plan.starts.astype(np.int64), plan.lengths.astype(np.int64)
    head = model.vocab_size * model.hidden_size
    pairs = int((lengths * starts + lengths * (lengths + 1) // 2).sum())
    flops = (
        2 * (model.parameters - head) * int(lengths.sum())
        + 2 * head * int(plan.samples.sum())
        + 4 * model.layers * model.hidden_size * pairs
    )
    return Work(model.weight_bytes + model.kv_bytes_per_token * int(starts.sum()), flops)


def measure_ceilings(device: Device, dtype: torch.dtype, weight_bytes: int) -> Ceilings:
    """Measure both ceilings on the device.

    Args:
        dtype: of the matrix product.
        weight_bytes: as much memory is read as the weights take, within bounds: if they fit into a cache, so does this.
    """
    import torch

    where = device.torch_device
    bandwidth = _read_rate(device, min(max(weight_bytes, LEAST), MOST))
    a, b = (torch.randn(SIDE, SIDE, device=where).to(dtype) for _ in range(2))
    return Ceilings(bandwidth, 2 * SIDE**3 / _fastest(device, lambda: a @ b))


def _read_rate(device: Device, size: int) -> float:
    """Bytes read a second out of a block of `size` bytes."""
    import torch

    block = torch.ones(size // 4, dtype=torch.float32, device=device.torch_device)
    return block.numel() * 4 / _fastest(device, block.sum)


def _fastest(device: Device, call: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls."""
    call()
    device.synchronise()
    best = float("inf")
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or best == float("inf"):
        started = time.perf_counter()
        call()
        device.synchronise()
        best = min(best, time.perf_counter() - started)
    return best
