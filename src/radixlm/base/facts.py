"""This module owns what was found out at start: facts about the model, the device and the pool. Measured, never
configured.
"""

from __future__ import annotations

import msgspec

from radixlm.base.request import PoolingKind


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the device is. `features` are lower-case names such as `avx512_bf16`, `amx_bf16`, `sm_90`."""

    kind: str  # cpu, cuda, null
    name: str
    memory_total: int  # bytes
    memory_free: int  # bytes
    cores: int  # cores of a CPU, multiprocessors of a GPU
    threads: int = 1
    features: tuple[str, ...] = ()


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the loaded model is.

    Attributes:
        vocab_size: width of the model's output: the first id out of range.
        sampled_vocab_size: ids from here on are padding and never chosen.
        eos_ids: the ids that end a text.
        context_length: positions the model was made for (or the configured limit, if smaller).
        generates: it continues texts. False for an encoder, which only makes vectors of them.
        pooling: how its hidden states become the vector of a text where a request does not say.
    """

    name: str
    path: str
    architecture: str
    dtype: str
    parameters: int
    layers: int
    hidden_size: int
    vocab_size: int
    sampled_vocab_size: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    context_length: int
    kv_bytes_per_token: int
    weight_bytes: int
    generates: bool = True
    pooling: PoolingKind = "last"


class PoolFacts(msgspec.Struct, frozen=True, kw_only=True):
    pages: int
    page_size: int  # tokens
    max_running: int
    bytes: int

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the api process may tell people about a ready engine.

    Attributes:
        decisions: name -> (value, reason) of each choice made at start, e.g. the attention backend.
        timings: name -> seconds of each stage of the start.
        shared_prefix: the runner makes use of `Plan.shared`.
    """

    model: ModelFacts
    device: DeviceFacts
    pool: PoolFacts
    decisions: dict[str, tuple[str, str]]
    timings: dict[str, float]
    shared_prefix: bool = False
