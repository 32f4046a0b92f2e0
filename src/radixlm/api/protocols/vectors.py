"""This module owns what every route that makes vectors shares: pooling, length, and how a vector is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from radixlm.api import errors
from radixlm.api.service import Service
from radixlm.base.errors import BadRequest
from radixlm.base.plan import Floats
from radixlm.base.request import PoolingKind
from radixlm.wire.messages import TextDelta

KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)


def read_pooling(asked: str | None, service: Service) -> PoolingKind:
    """The model's own way unless the client names one."""
    if asked is None:
        return service.facts.model.pooling
    for kind in KINDS:
        if asked == kind:
            return kind
    raise BadRequest(f"pooling is {asked[:40]!r}; it must be one of {', '.join(KINDS)}", param="pooling")


def check_dimensions(asked: int | None, service: Service) -> int:
    """How many numbers of each vector are wanted."""
    size = service.facts.model.hidden_size
    if asked is None:
        return size
    if not 1 <= asked <= size:
        raise BadRequest(f"dimensions is {asked}; this model's vectors have 1 to {size}", param="dimensions")
    return asked


def vector_of(delta: TextDelta) -> Floats:
    """The vector [hidden_size] that a sequence ended with. Raises the error of one that failed."""
    error = errors.of_delta(delta)
    if error is not None:
        raise error
    if delta.vector is None:
        raise errors.internal()
    return np.frombuffer(delta.vector, "<f4")


def shaped(vector: Floats, dimensions: int, normalize: bool) -> Floats:
    """The first `dimensions` numbers, at length 1 if wanted. A vector of zeros stays one.

    That a part of a vector is one too is Matryoshka learning (Kusupati et al. 2022, arXiv:2205.13147).
    """
    cut = vector[:dimensions]
    if not normalize:
        return cut
    length = float(np.linalg.norm(cut.astype(np.float64)))
    return (cut / np.float32(length)).astype(np.float32) if length > 0.0 else cut


def cosines(query: Floats, others: Sequence[Floats]) -> list[float]:
    """The cosine of the angle between the query and each of the others, in [-1, 1]."""
    rows = np.stack([query, *others]).astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    found: list[float] = np.clip(rows[1:] @ rows[0], -1.0, 1.0).tolist()
    return found
