"""This module owns rotary position embedding: the angle of every position, and the rotation itself.

Sources: RoPE (Su et al., arXiv:2104.09864), linear interpolation (Chen et al., arXiv:2306.15595), YaRN (Peng et al.,
arXiv:2309.00071), NTK-aware and dynamic scaling (as in transformers), and the wavelength bands of Llama 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from radixlm.ops import gpu

#: The scalings that `inverse_frequencies` knows.
KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """One rotation: the base and how it is stretched beyond the trained length.

    Attributes:
        dim: rotated dimensions of a head (all of them).
        original: positions the model was trained for before stretching.
        attention_factor: multiplier of cos and sin (yarn; 0: derived from `factor`, `mscale` and `mscale_all_dim`).
        truncate: yarn rounds the band of dimensions it blends outward to whole dimensions.
    """

    dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


def inverse_frequencies(rope: RopeParameters, positions: int) -> torch.Tensor:
    """Radians per position: [dim / 2] float32, or [positions, dim / 2] where they depend on the position (dynamic).

    Dynamic scaling recomputes the base for the length so far. Here position p always uses the length p + 1, which is
    what decoding token by token gives, so that a key depends on its position alone and can be reused.
    """
    exponent = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    if rope.kind == "dynamic":
        length = torch.arange(1, positions + 1, dtype=torch.float64).clamp_(min=rope.original)
        stretch = rope.factor * length / rope.original - (rope.factor - 1)
        base = rope.theta * stretch ** (rope.dim / (rope.dim - 2))
        return 1.0 / base.float()[:, None] ** exponent
    plain = 1.0 / rope.theta**exponent
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def attention_factor(rope: RopeParameters) -> float:
    """What cos and sin are multiplied by: YaRN's correction of the softmax temperature, 1 for the others."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1.0 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def table(rope: RopeParameters, positions: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[positions, 2, dim]: the cosines, then the sines whose first half is negated, as `rotate_` wants them.

    Angles are computed in float32 and rounded to `dtype` at the end.
    """
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope, positions)
    factor = attention_factor(rope)
    cos, sin = angles.cos().mul_(factor).to(dtype), angles.sin().mul_(factor).to(dtype)
    out = torch.empty(positions, 2, rope.dim, dtype=dtype)
    torch.cat((cos, cos), -1, out=out[:, 0])
    torch.cat((-sin, sin), -1, out=out[:, 1])
    return out.to(device)


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, dim] rotated by cos, sin [T, dim] (plain sines), in float32."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos.float()[:, None] + turned * sin.float()[:, None]).to(x.dtype)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, heads, dim] in place by cos, sin [T, 1, dim] from `table`. x may be a view."""
    if (kernels := gpu.kernels(x)) is not None:
        out: torch.Tensor = kernels.rotate_(x, cos, sin)
        return out
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(swapped, sin)


def _llama3(rope: RopeParameters, plain: torch.Tensor) -> torch.Tensor:
    """Short wavelengths stay, long ones are stretched by `factor`, those between are blended."""
    wavelength = 2 * math.pi / plain
    blend = (rope.original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn(rope: RopeParameters, plain: torch.Tensor) -> torch.Tensor:
    """Dimensions that turn often within the original length stay, slow ones are stretched, a ramp joins them."""

    def dimension(turns: float) -> float:
        return rope.dim * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
