"""This module owns the feed-forward layer that is a mixture of experts: router, experts, maybe one for all tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from radixlm.base.errors import StartupError
from radixlm.layers.mlp import FeedForward
from radixlm.layers.norm import RmsNorm
from radixlm.layers.source import Source
from radixlm.ops.activation import Activation
from radixlm.ops.linear import Linear
from radixlm.ops.moe import GpuMixture, GroupedMixture, Mixture, has_kernels
from radixlm.parallel.base import Comm
from radixlm.parallel.local import ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """
    Attributes:
        experts: how many there are.
        active: how many of them each token goes through.
        inner: inner width of an expert.
        renormalise: the weights of a token's experts are made to sum to 1.
        layers: those that are mixtures; the others are dense.
        shared: inner width of an expert that every token goes through beside its own (0: there is none).
    """

    experts: int
    active: int
    inner: int
    renormalise: bool
    layers: frozenset[int]
    shared: int = 0


class SharedExpert:
    """A feed-forward part for every token, weighted by the sigmoid of a number that a product of its own gives."""

    __slots__ = ("_gate", "_mlp")

    def __init__(self, mlp: FeedForward, gate: Linear) -> None:
        self._mlp = mlp
        self._gate = gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._mlp(x).mul_(self._gate(x).sigmoid_())


class MoeMlp:
    """The experts of each token, and what all share, added up.

    With several ranks each holds a part of every expert; they route alike, and their sums are added up once.
    """

    __slots__ = ("_comm", "_mixture", "_norm", "_router", "_shared")

    def __init__(
        self,
        router: Linear,
        mixture: Mixture,
        shared: SharedExpert | None = None,
        norm: RmsNorm | None = None,
        comm: Comm = ALONE,
    ) -> None:
        """
        Args:
            router: [T, hidden] -> [T, experts], whole on every rank.
            norm: what the input is normalised by first.
        """
        self._comm = comm
        self._router = router
        self._mixture = mixture
        self._shared = shared
        self._norm = norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._comm.all_reduce_(self._ours(x, None))

    def plus(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The same, added to residual, which may be x and may be overwritten."""
        # What is added to the sum is added by one rank.
        return self._comm.all_reduce_(self._ours(x, residual if self._comm.rank == 0 else None))

    def _ours(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """This rank's part, and the residual if there is one."""
        x = x if self._norm is None else self._norm(x)
        if self._shared is not None:
            shared = self._shared(x)
            residual = shared if residual is None else shared.add_(residual)
        scores = self._router(x)
        return self._mixture(x, scores) if residual is None else self._mixture.plus(x, scores, residual)


def build(
    spec: MoeSpec,
    source: Source,
    name: str,
    hidden: int,
    activation: Activation,
    mlp: Callable[[str, int], FeedForward],
    norm: RmsNorm | None = None,
) -> MoeMlp:
    """The layer of the tensors under `name`: `gate`, `experts.<n>.{gate,up,down}_proj`, `shared_expert`,
    `shared_expert_gate`.

    Args:
        mlp: makes a dense feed-forward part from its name and inner width; with several ranks it gives this rank's part
            of the sum.
        norm: what the input is normalised by first; only where `Source.fuses_norms`.
    """
    if source.fixed:
        raise StartupError(
            "--deterministic has no kernel for mixtures of experts yet; use a dense model", param="deterministic"
        )
    router = source.linear([f"{name}.gate"], [spec.experts], hidden)
    mixture: Mixture
    if has_kernels(source.device):
        gate_up, down = _stack(spec, source, f"{name}.experts", hidden)
        mixture = GpuMixture(gate_up, down, spec.active, spec.renormalise, activation)
    else:
        experts = [mlp(f"{name}.experts.{index}", spec.inner) for index in range(spec.experts)]
        mixture = GroupedMixture(experts, spec.active, spec.renormalise)
    shared = None
    if spec.shared:
        gate = source.linear([f"{name}.shared_expert_gate"], [1], hidden)
        shared = SharedExpert(mlp(f"{name}.shared_expert", spec.shared), gate)
    return MoeMlp(router, mixture, shared, norm, source.comm)


def _stack(spec: MoeSpec, source: Source, name: str, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [experts, 2 * inner, hidden] and [experts, hidden, inner], filled in place: one expert is held twice.

    `inner` is this rank's share.
    """
    whole, dtype, device = spec.inner, source.dtype, source.device
    rows, columns = source.part(0, whole), source.part(1, whole)
    inner = whole if rows is None else rows.length
    gate_up = torch.empty(spec.experts, 2 * inner, hidden, dtype=dtype, device=device)
    down = torch.empty(spec.experts, hidden, inner, dtype=dtype, device=device)
    for index in range(spec.experts):
        gate_up[index, :inner] = source.tensor(f"{name}.{index}.gate_proj.weight", whole, hidden, part=rows)
        gate_up[index, inner:] = source.tensor(f"{name}.{index}.up_proj.weight", whole, hidden, part=rows)
        down[index] = source.tensor(f"{name}.{index}.down_proj.weight", hidden, whole, part=columns)
    return gate_up, down
