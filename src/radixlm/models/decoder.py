"""This module owns the decoder that most model families share. They differ in a `DecoderSpec`, which is data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from radixlm.attention.base import LayerSpec, Step
from radixlm.base.errors import StartupError
from radixlm.layers import moe
from radixlm.layers.attention import Attention
from radixlm.layers.head import Head
from radixlm.layers.mlp import FeedForward, GatedMlp, MergedMlp
from radixlm.layers.moe import MoeSpec
from radixlm.layers.norm import RmsNorm
from radixlm.layers.rope import Rope, Rotation
from radixlm.layers.source import Source
from radixlm.models.base import Weights
from radixlm.ops import activation
from radixlm.ops.rope import RopeParameters
from radixlm.parallel.base import Comm
from radixlm.parallel.local import ALONE
from radixlm.parallel.shares import fits, nearest, share


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Everything in which two families differ.

    Attributes:
        context_length: positions to prepare for.
        eps: of all norms.
        attention: one entry per layer: heads, sizes, scale, window, soft cap.
        ropes: the kinds of rotation; `rope_of[i]` is the index of layer i's.
        qkv_bias, out_bias, mlp_bias: which projections have one.
        head_norm: queries and keys are normalised per head.
        norm_offset: what norm weights are stored without (Gemma: 1).
        sandwich: attention and feed-forward outputs are normalised before they are added to the residual.
        embed_scale: multiplier of embeddings.
        logit_cap: soft cap of the logits (0: none).
        tied: the head is the embedding table, whether or not the checkpoint also has a head.
        moe: feed-forward parts that are mixtures of experts, in which layers.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    context_length: int
    eps: float
    activation: str
    attention: tuple[LayerSpec, ...]
    ropes: tuple[RopeParameters, ...]
    rope_of: tuple[int, ...]
    tied: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False
    norm_offset: float = 0.0
    sandwich: bool = False
    embed_scale: float = 1.0
    logit_cap: float = 0.0
    moe: MoeSpec | None = None


#: Names of a block's norms, in the order in which they are applied.
PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
SANDWICH_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

#: One layer: (hidden, rotations, step) -> hidden.
Block = Callable[[torch.Tensor, Sequence[Rotation], Step], torch.Tensor]


class PreNormBlock:
    """x + attention(norm(x)), then x + mlp(norm(x)). Both additions happen inside the last product."""

    __slots__ = ("_attention", "_first", "_mlp", "_rope", "_second")

    def __init__(self, attention: Attention, mlp: FeedForward, norms: Sequence[RmsNorm], rope: int) -> None:
        self._attention = attention
        self._mlp = mlp
        self._first, self._second = norms
        self._rope = rope

    def __call__(self, x: torch.Tensor, rotations: Sequence[Rotation], step: Step) -> torch.Tensor:
        x = self._attention.plus(self._first(x), rotations[self._rope], step, x)
        return self._mlp.plus(self._second(x), x)


class FusedBlock:
    """The same where the first product of each part normalises its input (`Source.fuses_norms`)."""

    __slots__ = ("_attention", "_mlp", "_rope")

    def __init__(self, attention: Attention, mlp: FeedForward, rope: int) -> None:
        self._attention = attention
        self._mlp = mlp
        self._rope = rope

    def __call__(self, x: torch.Tensor, rotations: Sequence[Rotation], step: Step) -> torch.Tensor:
        x = self._attention.plus(x, rotations[self._rope], step, x)
        return self._mlp.plus(x, x)


class SandwichBlock:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    __slots__ = ("_attention", "_mlp", "_norms", "_rope")

    def __init__(self, attention: Attention, mlp: FeedForward, norms: Sequence[RmsNorm], rope: int) -> None:
        self._attention = attention
        self._mlp = mlp
        self._norms = norms
        self._rope = rope

    def __call__(self, x: torch.Tensor, rotations: Sequence[Rotation], step: Step) -> torch.Tensor:
        before, after, before_mlp, after_mlp = self._norms
        x = after(self._attention(before(x), rotations[self._rope], step)).add_(x)
        return after_mlp(self._mlp(before_mlp(x))).add_(x)


class Decoder:
    """Embedding, blocks, norm, head.

    Attributes:
        layers: attention as this rank computes it: its own share of the heads.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        comm: Comm = ALONE,
        fixed: bool = False,
    ) -> None:
        refuse_uneven(spec, comm.size)
        self.layers = tuple(_share(layer, comm) for layer in spec.attention)
        self.vocab_size = spec.vocab_size
        self.hidden_size = spec.hidden_size
        source = Source(weights, dtype, device, comm, fixed)
        # A checkpoint of the bare decoder names its tensors without the prefix.
        prefix = "" if source.has("embed_tokens.weight") else "model."
        self._embedding = source.embedding(
            f"{prefix}embed_tokens.weight", spec.vocab_size, spec.hidden_size, spec.embed_scale
        )
        self._ropes = [Rope(parameters, spec.context_length, dtype, device) for parameters in spec.ropes]
        self._blocks = [_block(spec, source, f"{prefix}layers.{index}", index) for index in range(len(spec.attention))]
        self._norm = _norm(spec, source, f"{prefix}norm")
        if spec.tied:
            linear = source.tied(self._embedding.table, spec.vocab_size)
        else:
            linear = source.head("lm_head", spec.vocab_size, spec.hidden_size)
        self._head = Head(linear, spec.logit_cap)
        self._parameters = source.parameters
        self._bytes = source.bytes + sum(rope.bytes for rope in self._ropes)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """ids, positions [T] int64 -> hidden states [T, hidden_size] after the last norm."""
        rotations = [rope(positions) for rope in self._ropes]
        x = self._embedding(ids)
        for block in self._blocks:
            x = block(x, rotations, step)
        return self._norm(x)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden_size] -> logits [N, vocab_size]."""
        return self._head(hidden)

    def parameter_count(self) -> int:
        return self._parameters

    def weight_bytes(self) -> int:
        return self._bytes


def refuse_uneven(spec: DecoderSpec, size: int) -> None:
    """Refuse a number of ranks that cannot hold equal shares of every layer; the message names the nearest that can.

    The vocabulary may have any size (see `Source.embedding`).
    """
    if cuts := _obstacles(spec, size):
        works = " or ".join(map(str, nearest(size, lambda n: not _obstacles(spec, n))))
        raise StartupError(
            f"--tensor-parallel-size is {size}, and this model cannot be cut into {size} equal parts: it has "
            f"{', '.join(cuts)}; use {works}",
            param="tensor_parallel_size",
        )


def _obstacles(spec: DecoderSpec, size: int) -> list[str]:
    """What cannot be shared equally by `size` ranks."""
    inner = {spec.intermediate_size: "an intermediate size"}
    if spec.moe is not None:
        dense = inner if len(spec.moe.layers) < len(spec.attention) else {}
        inner = {spec.moe.shared: "a shared expert", spec.moe.inner: "experts", **dense}
    found = [f"{what} of {width}" for width, what in inner.items() if width % size]
    for layer in spec.attention:
        if layer.heads % size:
            found.append(f"{layer.heads} attention heads")
        if not fits(layer.kv_heads, size):
            found.append(f"{layer.kv_heads} key-value heads")
    return list(dict.fromkeys(found))


def _share(layer: LayerSpec, comm: Comm) -> LayerSpec:
    """The heads of one rank."""
    heads, kv_heads = (share(units, comm.rank, comm.size)[1] for units in (layer.heads, layer.kv_heads))
    return replace(layer, heads=heads, kv_heads=kv_heads)


def _block(spec: DecoderSpec, source: Source, name: str, index: int) -> Block:
    """Layer `index`, from the tensors under `name`."""
    layer, hidden = spec.attention[index], spec.hidden_size
    heads = (layer.heads, layer.kv_heads, layer.kv_heads)
    q_size, kv_size = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    kind, parts = (SandwichBlock, SANDWICH_NORMS) if spec.sandwich else (PreNormBlock, PRE_NORMS)
    norms = [_norm(spec, source, f"{name}.{part}") for part in parts]
    fused = source.fuses_norms and not spec.sandwich
    qkv = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
    ours = _share(layer, source.comm)
    attention = Attention(
        index,
        ours,
        source.column(
            qkv,
            [q_size, kv_size, kv_size],
            hidden,
            units=heads,
            bias=spec.qkv_bias,
            norm=norms[0] if fused else None,
        ),
        source.row(f"{name}.self_attn.o_proj", hidden, q_size, units=layer.heads, bias=spec.out_bias),
        _head_norm(spec, source, f"{name}.self_attn", ours) if spec.head_norm else None,
    )
    mlp = _feed_forward(spec, source, f"{name}.mlp", index, norms[1] if fused else None)
    if fused:
        return FusedBlock(attention, mlp, spec.rope_of[index])
    return kind(attention, mlp, norms, spec.rope_of[index])


def _feed_forward(spec: DecoderSpec, source: Source, name: str, index: int, norm: RmsNorm | None) -> FeedForward:
    """The feed-forward part of layer `index`."""
    if spec.moe is None or index not in spec.moe.layers:
        return _mlp(spec, source, name, norm)

    def mlp(name: str, inner: int) -> FeedForward:
        return _mlp(replace(spec, intermediate_size=inner), source, name, summed=False)

    return moe.build(spec.moe, source, name, spec.hidden_size, activation.find(spec.activation), mlp, norm)


def _mlp(
    spec: DecoderSpec, source: Source, name: str, norm: RmsNorm | None = None, summed: bool = True
) -> GatedMlp | MergedMlp:
    """The feed-forward part; `norm` goes into its first product, where those are fused. `summed`: see `Source.row`."""
    hidden, inner, function = spec.hidden_size, spec.intermediate_size, activation.find(spec.activation)
    gate_up = [f"{name}.gate_proj", f"{name}.up_proj"]
    down = source.row(f"{name}.down_proj", hidden, inner, bias=spec.mlp_bias, summed=summed)
    if source.packs:
        gate, up = (source.column([part], [inner], hidden, bias=spec.mlp_bias) for part in gate_up)
        return GatedMlp(gate, up, down, function)
    merged = source.column(gate_up, [inner, inner], hidden, bias=spec.mlp_bias, norm=norm)
    return MergedMlp(merged, down, function)


def _norm(spec: DecoderSpec, source: Source, name: str) -> RmsNorm:
    weight = source.tensor(f"{name}.weight", spec.hidden_size, dtype=torch.float32)
    return RmsNorm(weight + spec.norm_offset, spec.eps)


def _head_norm(spec: DecoderSpec, source: Source, name: str, layer: LayerSpec) -> RmsNorm:
    """One norm for all query and key heads: its weight repeats the queries' per query head, then the keys'."""
    q, k = (source.tensor(f"{name}.{part}_norm.weight", layer.head_dim, dtype=torch.float32) for part in "qk")
    weight = torch.cat((q.expand(layer.heads, -1), k.expand(layer.kv_heads, -1)))
    return RmsNorm(weight + spec.norm_offset, spec.eps)
