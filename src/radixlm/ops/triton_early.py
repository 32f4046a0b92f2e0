"""This module owns early starts: a kernel takes its place on the GPU while the one before it ends, fetches what cannot
depend on that one, and waits for it before it reads or writes anything else (NVIDIA's programmatic dependent launch).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from radixlm.ops import gpu

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton built for AMD alone
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def begin(EARLY: tl.constexpr):
    """The first thing in a kernel: from here on the next one may take its place."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Before a kernel reads what others write, or writes. Every program of an early kernel must pass here."""
    if EARLY:
        gdc_wait()


@triton.jit
def fetch(start, BYTES: tl.constexpr, THREADS: tl.constexpr):
    """Ask for BYTES from `start` on to be brought into the L2 cache: each thread for a piece."""
    size: tl.constexpr = BYTES // THREADS
    pieces = start.to(tl.int64) + tl.arange(0, THREADS) * size
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [pieces, tl.full([THREADS], size, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def launch(x: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments for the launch of a kernel that has the parameter EARLY and calls `begin` and `wait`."""
    # The option is unknown to backends that cannot do it.
    return {"EARLY": True, "launch_pdl": True} if gpu.EARLY and _able(x.device) else {"EARLY": False}


@functools.cache
def _able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
