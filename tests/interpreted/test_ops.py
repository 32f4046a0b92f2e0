"""The Triton kernels of elementwise ops, interpreted, against their torch references."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from radixlm.ops.activation import SILU, gated
from radixlm.ops.norm import rms_norm_reference
from radixlm.sampling.sampler import LARGEST_SCORE, NOT_FINITE
from support.ops import QKV_SHAPES, Layer, scores_of_every_kind

DTYPES = [torch.float32, torch.float16]
ROUNDING = {torch.float32: 1e-5, torch.float16: 1e-3}


@pytest.fixture
def kernels() -> ModuleType:
    from radixlm.ops import triton_kernels

    return triton_kernels


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(kernels: ModuleType, dtype: torch.dtype) -> None:
    eps = torch.tensor([1e-5])
    for x, weight in (
        (torch.randn(3, 40), torch.randn(40)),
        (torch.randn(2, 5, 24)[:, :3], torch.randn(3, 24)),
    ):
        got = kernels.rms_norm(x.to(dtype), weight, eps)
        assert error(got, rms_norm_reference(x.to(dtype), weight, 1e-5)) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_multiply(kernels: ModuleType, dtype: torch.dtype) -> None:
    x = torch.randn(3, 80).to(dtype)
    assert error(kernels.silu_mul(x), gated(x.float(), SILU)) < ROUNDING[dtype]


@pytest.mark.parametrize("shape", QKV_SHAPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", DTYPES, ids=str)
def test_norm_rotation_and_write_in_one(
    kernels: ModuleType, dtype: torch.dtype, kept: torch.dtype, normed: bool, shape: tuple[int, int, int]
) -> None:
    layer = Layer(shape, 3, dtype, kept, normed, torch.device("cpu"))
    layer.check(kernels.prepare_qkv, max(ROUNDING[dtype], ROUNDING[kept]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_best_of_each_row(kernels: ModuleType, dtype: torch.dtype) -> None:
    scores, tokens, sound = scores_of_every_kind(4100, dtype)
    got, status = kernels.best(scores, LARGEST_SCORE, NOT_FINITE)
    assert got.tolist() == tokens
    assert status.dtype == torch.int8
    assert status.tolist() == [0 if good else NOT_FINITE for good in sound]
