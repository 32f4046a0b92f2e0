"""This module owns the way from GGML's block formats to plain numbers, a slab of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from radixlm.checkpoint.gguf import Bytes, TensorInfo

Floats = npt.NDArray[np.float32]
Half = npt.NDArray[np.uint16]

#: Values dequantised at once: few enough to stay in a CPU's cache, enough to hide numpy's overhead.
SLAB = 1 << 19


def slabs(info: TensorInfo, rows: npt.NDArray[np.int64] | None = None) -> Iterator[Floats]:
    """The values of a tensor as float32 [some rows, columns], in order.

    Args:
        rows: another order of the rows. A row is a whole number of blocks, so rows move as they are stored.
    """
    step = max(1, SLAB // info.shape[-1])
    for start in range(0, len(info.raw), step):
        raw = info.raw[start : start + step] if rows is None else info.raw[rows[start : start + step]]
        yield to_float32(raw, info.kind)


def to_float32(raw: Bytes, kind: str) -> Floats:
    """[rows, bytes of a row] of GGML type `kind` -> [rows, columns]."""
    if kind == "F32":
        return raw.view("<f4")
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    if kind == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    # Its import takes a second, and a start from converted weights has no need of it.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: Floats = dequantize(raw, GGMLQuantizationType[kind])
    return values


def to_bfloat16(values: Floats) -> Half:
    """The bits of bfloat16, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = bits >> np.uint32(16)
    odd &= np.uint32(1)
    odd += np.uint32(0x7FFF)
    odd += bits
    odd >>= np.uint32(16)
    return odd.astype(np.uint16)
