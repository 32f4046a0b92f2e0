"""This module owns the building of a runner for an encoder: weights on an opened device, and no KV pool."""

from __future__ import annotations

import msgspec
import torch

from radixlm.base.errors import StartupError
from radixlm.base.facts import EngineFacts, PoolFacts
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.config.schema import Config
from radixlm.device.base import Device
from radixlm.memory.budget import MAX_RUNNING
from radixlm.models import table
from radixlm.models.load import open_weights
from radixlm.runner.encoder import EncoderRunner
from radixlm.runner.identity import identify, limit_context
from radixlm.runner.journal import Journal
from radixlm.runner.vocabulary import Vocabulary


def build_encoder(
    config: Config, checkpoint: Checkpoint, vocabulary: Vocabulary, device: Device, journal: Journal
) -> EncoderRunner:
    """A runner, warmed up.

    Raises:
        StartupError: the weights are broken.
    """
    threads, reason = device.set_threads(config.device.threads)
    journal.decide("threads", threads, reason)
    dtype = _dtype(config, checkpoint, journal)
    with journal.stage("weights"):
        family = table.find_encoder(checkpoint.config)
        context = limit_context(config, family.context_length(checkpoint.config), checkpoint.name)
        weights = open_weights(checkpoint, config.model.load_format, config.model.random_seed or 0, device.torch_device)
        model = family.build(checkpoint.config, weights, dtype, device.torch_device)
    rows = config.schedule.max_running_requests or MAX_RUNNING
    tokens = max(config.cache.max_total_tokens or rows * context, context)
    name = str(dtype).removeprefix("torch.")
    identity = identify(config, checkpoint, vocabulary, dtype=name, vocab_size=model.vocab_size, context_length=context)
    facts = EngineFacts(
        model=msgspec.structs.replace(
            identity,
            parameters=model.parameter_count(),
            layers=model.layer_count,
            hidden_size=model.hidden_size,
            weight_bytes=model.weight_bytes(),
            generates=False,
        ),
        device=device.facts(),
        pool=PoolFacts(pages=tokens, page_size=1, max_running=rows, bytes=0),
        decisions=journal.decisions,
        timings=journal.timings,
    )
    runner = EncoderRunner(model, device, facts)
    with journal.stage("warm-up"):
        runner.warm_up()
    return runner


def _dtype(config: Config, checkpoint: Checkpoint, journal: Journal) -> torch.dtype:
    """What the weights are stored in: encoders are small, and their vectors are compared by small differences."""
    stored = checkpoint.config.get("torch_dtype") or "float32"
    name, reason = (stored, "the model's") if config.model.dtype == "auto" else (config.model.dtype, "asked for")
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise StartupError(f"{name!r} is no data type")
    journal.decide("dtype", name, reason)
    return dtype
