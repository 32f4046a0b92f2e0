"""This module owns the building of a runner that computes: weights, pool and attention on an opened device."""

from __future__ import annotations

import zlib
from types import MappingProxyType

import msgspec
import torch

from radixlm.attention.base import AttentionBackend
from radixlm.attention.select import choose as choose_attention
from radixlm.base.errors import StartupError
from radixlm.base.facts import EngineFacts, PoolFacts
from radixlm.base.registry import Choice
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.config.schema import Config, DeviceConfig
from radixlm.device.base import Device
from radixlm.memory.budget import Budget, Demand, budget
from radixlm.memory.pool import KVPool
from radixlm.models import table
from radixlm.models.base import Model, Weights
from radixlm.models.load import open_weights
from radixlm.parallel.base import Comm
from radixlm.parallel.shares import Cut
from radixlm.runner.identity import identify, limit_context
from radixlm.runner.journal import Journal, Report
from radixlm.runner.runner import Runner
from radixlm.runner.vocabulary import Vocabulary

#: Share of the free memory that the pool takes by default. A CPU's memory belongs to everybody on the machine; on a GPU
#: the rest is for activations.
POOL_SHARE = {"cpu": 0.5, "cuda": 0.85}

#: Sequences running at once by default. A GPU reads its weights, and a prefix that many share, once for all of them.
MOST_RUNNING = {"cpu": 256, "cuda": 1024}

#: KV cache of 8 bits, by the names users know, and what a GPU must be to convert them.
FP8 = MappingProxyType({"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2})
FP8_CAPABLE = (8, 9)

#: Page sizes tried when none was asked for: the first one that the attention backends take.
PAGE_SIZES = (1, 16, 32, 64)


class CountedWeights:
    """Weights that report how many of their tensors were read."""

    def __init__(self, weights: Weights, report: Report) -> None:
        self._weights = weights
        self._report = report
        self._unread = set(weights.names())
        self._count = len(self._unread)

    def names(self) -> frozenset[str]:
        return self._weights.names()

    def get(self, name: str, shape: tuple[int, ...] | None = None, part: Cut | None = None) -> torch.Tensor:
        tensor = self._weights.get(name, shape, part)
        if name in self._unread:
            self._unread.remove(name)
            self._report("weights", 1.0 - len(self._unread) / self._count)
        return tensor


def build(
    config: Config, checkpoint: Checkpoint, vocabulary: Vocabulary, device: Device, comm: Comm, journal: Journal
) -> tuple[Runner, int, str]:
    """A runner, warmed up, and the page size with the reason for it. With several ranks, all of them build theirs at
    the same time; what the plans depend on comes out equal.

    Raises:
        StartupError: the model is not known, its weights are broken, or memory does not suffice.
    """
    threads, reason = device.set_threads(config.device.threads)
    journal.decide("threads", threads, reason)
    dtype = _dtype(config, checkpoint, device, journal)
    with journal.stage("weights"):
        family = table.find(checkpoint.config)
        context = limit_context(config, family.context_length(checkpoint.config), checkpoint.name)
        seed = config.model.random_seed or 0
        opened = open_weights(checkpoint, config.model.load_format, seed, device.torch_device)
        weights = CountedWeights(opened, journal.report)
        fixed = config.device.deterministic and device.kind == "cuda"
        model = family.build(checkpoint.config, weights, dtype, device.torch_device, comm, fixed)
    with journal.stage("memory"):
        kv_dtype = _kv_dtype(config, dtype, device, journal)
        extend, decode, page_size, page_reason = _attention(
            config.device, config.cache.page_size, model, (dtype, kv_dtype), device, journal
        )
        shapes = [(spec.kv_heads, spec.head_dim) for spec in model.layers]
        per_token = sum(2 * heads * dim for heads, dim in shapes) * kv_dtype.itemsize
        _agree(comm, dtype=_short(dtype), kv_cache_dtype=_short(kv_dtype), page_size=page_size)
        size = _size(config, model, device, comm, per_token, page_size, context)
        graphs = device.kind == "cuda" and not config.device.disable_cuda_graph
        pool = KVPool(shapes, size.pages + graphs, page_size, kv_dtype, device.torch_device)
    if comm.size > 1:
        journal.decide("tensor_parallel_size", comm.size, f"asked for; sums over {comm.name}; sizes are of each rank")
    journal.decide("kv_pool", f"{size.tokens} tokens", size.reason)
    if config.schedule.max_running_requests is None:
        journal.decide("max_running_requests", size.max_running, "by the pool's size")
    identity = identify(
        config,
        checkpoint,
        vocabulary,
        dtype=_short(dtype),
        vocab_size=model.vocab_size,
        context_length=size.context_length,
    )
    facts = EngineFacts(
        model=msgspec.structs.replace(
            identity,
            parameters=model.parameter_count(),
            layers=len(model.layers),
            hidden_size=model.hidden_size,
            kv_bytes_per_token=per_token,
            weight_bytes=model.weight_bytes(),
        ),
        device=device.facts(),
        pool=PoolFacts(pages=size.pages, page_size=page_size, max_running=size.max_running, bytes=pool.bytes),
        decisions=journal.decisions,
        timings=journal.timings,
        shared_prefix=decode.capabilities.shared_prefix and any(not spec.window for spec in model.layers),
    )
    runner = Runner(model, pool, extend, decode, device, facts, graphs)
    with journal.stage("warm-up"):
        runner.warm_up()
    return runner, page_size, page_reason


def _dtype(config: Config, checkpoint: Checkpoint, device: Device, journal: Journal) -> torch.dtype:
    if config.device.deterministic and device.kind == "cpu":
        # Its products have other orders of sums for other batches; in float32 that decides no token.
        if config.model.dtype not in ("auto", "float32"):
            raise StartupError(
                f"--deterministic computes in float32 on a CPU, and --dtype is {config.model.dtype}: leave one out",
                param="deterministic",
            )
        dtype, reason = torch.float32, "--deterministic"
    elif config.model.dtype != "auto":
        dtype, reason = _named(config.model.dtype), "asked for"
    else:
        stored = checkpoint.config.get("torch_dtype")
        dtype, reason = device.default_dtype(_named(stored) if isinstance(stored, str) else None)
    journal.decide("dtype", _short(dtype), reason)
    return dtype


def _kv_dtype(config: Config, dtype: torch.dtype, device: Device, journal: Journal) -> torch.dtype:
    if config.cache.kv_cache_dtype == "auto":
        journal.decide("kv_cache_dtype", _short(dtype), "the model's")
        return dtype
    asked = config.cache.kv_cache_dtype
    if asked in FP8 and not _takes_fp8(device):
        raise StartupError(
            f"--kv-cache-dtype {asked} needs a GPU of compute capability {'.'.join(map(str, FP8_CAPABLE))} or newer: "
            "use bfloat16 or float16",
            param="kv_cache_dtype",
        )
    journal.decide("kv_cache_dtype", asked, "asked for")
    return FP8[asked] if asked in FP8 else _named(asked)


def _takes_fp8(device: Device) -> bool:
    return device.kind == "cuda" and torch.cuda.get_device_capability(device.torch_device) >= FP8_CAPABLE


def _attention(
    config: DeviceConfig,
    page_size: int | None,
    model: Model,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: Device,
    journal: Journal,
) -> tuple[AttentionBackend, AttentionBackend, int, str]:
    """Backends of extends and of decode steps, and the page size that both take. `dtypes`: of activations, of KV."""
    dtype, kv_dtype = dtypes
    sizes = PAGE_SIZES if page_size is None else (page_size,)
    refusal = StartupError("no page size")
    for size in sizes:
        found: list[tuple[AttentionBackend, Choice]] = []
        try:
            for wanted in (config.prefill_attention_backend, config.decode_attention_backend):
                found.append(
                    choose_attention(
                        wanted or config.attention_backend,
                        device.kind,
                        dtype,
                        model.layers,
                        size,
                        kv_dtype,
                        config.deterministic and device.kind == "cuda",
                    )
                )
        except StartupError as error:
            refusal = error if size == sizes[0] else refusal
            continue
        (extend, first), (decode, second) = found
        journal.decide("prefill_attention", first.name, first.reason)
        journal.decide("decode_attention", second.name, second.reason)
        finest = size == sizes[0]
        reason = "prefixes can be shared up to any token" if finest else f"the smallest that {second.name} takes"
        return extend, decode, size, reason
    raise refusal


def _agree(comm: Comm, **choices: object) -> None:
    """Refuse ranks whose devices are so different that they chose differently; what they share has one form."""
    number = zlib.crc32(repr(choices).encode())
    if comm.minimum(number) != -comm.minimum(-number):
        ours = ", ".join(f"{name} {choice}" for name, choice in choices.items())
        raise StartupError(
            f"the devices of the ranks differ, and so do their defaults ({ours} on rank {comm.rank}): "
            "name one value for all with --dtype, --kv-cache-dtype and --page-size"
        )


def _size(
    config: Config, model: Model, device: Device, comm: Comm, per_token: int, page_size: int, context: int
) -> Budget:
    """The pool's size: as much as the rank that has least can hold."""
    comm.minimum(0)  # all have read their weights: what is free now is free for pools
    return budget(
        Demand(
            memory_total=comm.minimum(device.facts().memory_total // device.sharers),
            memory_free=comm.minimum(device.free_memory() // device.sharers),
            weight_bytes=-comm.minimum(-model.weight_bytes()),
            bytes_per_token=per_token,
            page_size=page_size,
            context_length=context,
            context_asked=config.model.context_length is not None,
            share=POOL_SHARE[device.kind],
            mem_fraction_static=config.cache.mem_fraction_static,
            max_total_tokens=config.cache.max_total_tokens,
            max_running=config.schedule.max_running_requests,
            most_running=MOST_RUNNING[device.kind],
        )
    )


def _named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StartupError(f"{name!r} is no data type")
    return dtype


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
