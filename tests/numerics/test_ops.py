"""Operations against their references, and the rotations against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from radixlm.base.errors import StartupError
from radixlm.models import config as reading
from radixlm.models.config import Fields
from radixlm.ops import activation, linear, rope
from radixlm.ops.activation import ACTIVATIONS, gated
from radixlm.ops.embedding import embed
from radixlm.ops.linear import PackedLinear, PlainLinear
from radixlm.ops.norm import rms_norm, rms_norm_reference
from radixlm.ops.rope import rotate_, rotate_reference

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
#: Relative errors of one rounding.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((got.float() - expected.float()).norm() <= ROUNDING[dtype] * expected.float().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype: torch.dtype) -> None:
    x = torch.randn(7, 15, 64).to(dtype)[:, :12]  # a view, as queries and keys are
    for weight in (torch.randn(64), torch.randn(12, 64)):
        before = x.clone()
        got = rms_norm(x, weight, torch.tensor([1e-5]))
        assert got.dtype == dtype
        assert close(got, rms_norm_reference(x, weight, 1e-5), dtype)
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_small_numbers_uses_eps(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 32) * 1e-4).to(dtype)
    got = rms_norm(x, torch.ones(32), torch.tensor([1e-5]))
    assert close(got, rms_norm_reference(x, torch.ones(32), 1e-5), dtype)
    assert not rms_norm(torch.zeros(1, 8), torch.ones(8), torch.tensor([1e-6])).any()


@pytest.mark.parametrize("count", [1, 2, 16, 130])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_products_equal_plain_ones(dtype: torch.dtype, bias: bool, count: int) -> None:
    if not linear.can_pack(dtype, CPU):
        pytest.skip(f"oneDNN does not multiply {dtype} natively on this processor")
    weight, offset = torch.randn(48, 96).to(dtype) / 8, torch.randn(48).to(dtype)
    packed = PackedLinear(weight, offset if bias else None)
    plain = PlainLinear(weight.float(), offset.float() if bias else None)
    x, other = torch.randn(count, 96).to(dtype), torch.randn(count, 48).to(dtype)
    kept = other.clone()
    wide, wide_other = x.float(), other.float()
    assert close(packed(x), plain(wide), dtype)
    assert close(packed.plus(x, other), plain.plus(wide, wide_other), dtype)
    assert close(packed.times(x, other), plain.times(wide, wide_other), dtype)
    for function in set(ACTIVATIONS.values()):
        assert close(packed.activated(x, function), plain.activated(wide, function), dtype), function.name
    assert torch.equal(other, kept)
    assert packed.bytes == (48 * 96 + (48 if bias else 0)) * dtype.itemsize


def test_a_dtype_that_cannot_be_packed_is_multiplied_plainly() -> None:
    made = linear.make(torch.randn(3, 4, dtype=torch.float64))
    assert isinstance(made, PlainLinear)
    assert made(torch.randn(2, 4, dtype=torch.float64)).shape == (2, 3)


def test_activations_by_name() -> None:
    x = torch.linspace(-4, 4, 50)
    assert torch.allclose(activation.find("gelu_pytorch_tanh").apply(x), torch.nn.GELU("tanh")(x))
    assert activation.find("swish") is activation.find("silu")
    assert torch.allclose(gated(x, activation.find("relu")), torch.relu(x[:25]) * x[25:])
    with pytest.raises(StartupError, match=r"'softplus'.*known: silu, swish"):
        activation.find("softplus")


def test_embedding_scale() -> None:
    table = torch.randn(9, 4)
    before = table.clone()
    assert torch.equal(embed(table, torch.tensor([3, 3, 8])), table[[3, 3, 8]])
    assert torch.equal(embed(table, torch.tensor([1, 2]), 2.5), table[[1, 2]] * 2.5)
    assert torch.equal(table, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation(dtype: torch.dtype) -> None:
    parameters = rope.RopeParameters(dim=32, theta=10_000.0)
    table = rope.table(parameters, 64, dtype, CPU)
    positions = torch.tensor([0, 5, 63, 1])
    found = table[positions]
    angles = positions[:, None] * rope.inverse_frequencies(parameters, 64)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    whole = torch.randn(4, 9, 32).to(dtype)
    x = whole[:, 2:7]
    expected = rotate_reference(x, cos, sin)
    rest = whole[:, 7:].clone()
    assert close(rotate_(x, found[:, :1], found[:, 1:]), expected, dtype)
    assert close(x, expected, dtype)  # in place
    assert torch.equal(whole[:, 7:], rest)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "null": {"rope_scaling": None},
    "linear, old spelling": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2}},
    "default": {"rope_scaling": {"rope_type": "default"}},
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3 without the original length": {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    },
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "yarn without the original length": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn with mscale": {
        "rope_scaling": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.5, "beta_fast": 16}
    },
    "yarn with a stated factor": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "truncate": False}
    },
    "new form": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    "new form without a base": {"rope_parameters": {"rope_type": "default"}},
}


def rope_config(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 256}
    return {**sizes, "rope_theta": 10_000.0, **changes}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scalings_equal_transformers(scaling: str) -> None:
    values = rope_config(**SCALINGS[scaling])
    parameters = reading.rope(Fields(values), 64, 256)
    embedding = LlamaRotaryEmbedding(LlamaConfig(**values))
    positions = torch.tensor([[0, 1, 100, 255, 256, 1000, 2047]])
    cos, sin = embedding(torch.zeros(1), positions)
    q, k = torch.randn(2, 1, 3, 7, 64).unbind()
    expected, _ = apply_rotary_pos_emb(q, k, cos, sin)
    found = rope.table(parameters, 2048, torch.float32, CPU)[positions[0]]
    got = rotate_(q[0].transpose(0, 1).clone(), found[:, :1], found[:, 1:])
    assert (got - expected[0].transpose(0, 1)).abs().max() < 1e-3


def test_dynamic_scaling_equals_transformers_token_by_token() -> None:
    """transformers changes the base as the sequence grows: what it does at position p is what the table holds there."""
    values = rope_config(max_position_embeddings=64, rope_scaling={"type": "dynamic", "factor": 4.0})
    parameters = reading.rope(Fields(values), 64, 64)
    embedding = LlamaRotaryEmbedding(LlamaConfig(**values))
    table = rope.table(parameters, 300, torch.float32, CPU)
    for position in (0, 10, 63, 64, 65, 100, 200, 299):
        cos, sin = embedding(torch.zeros(1), torch.tensor([[position]]))
        assert torch.allclose(table[position, 0], cos[0, 0], atol=1e-4), position
        assert torch.allclose(table[position, 1, 32:], sin[0, 0, 32:], atol=1e-4), position


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ("none", 256),
        ("linear", 512),
        ("llama3", 256),
        ("yarn", 256),
        ("yarn without the original length", 1024),
        ("new form", 512),
    ],
)
def test_context_length_follows_the_scaling(scaling: str, length: int) -> None:
    assert reading.context_length(Fields(rope_config(**SCALINGS[scaling])), 2048) == length


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' is not known here; known: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling has no 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling has no 'low_freq_factor'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be a mapping"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'; it must be a number"),
        ({"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is not 1"),
        ({"rope_theta": "big"}, "rope_theta is 'big'; it must be a number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_rope_that_cannot_be_read_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        reading.rope(Fields(rope_config(**changes)), 64, 256)
