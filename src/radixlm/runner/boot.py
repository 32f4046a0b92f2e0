"""This module owns the start of a runner: device, model, memory, attention, in order, with the reason for each choice.

It imports no torch itself, so that the null device needs none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from radixlm.base.errors import StartupError
from radixlm.base.facts import EngineFacts, PoolFacts
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.checkpoint.locate import locate
from radixlm.config import env
from radixlm.config.resolve import derive
from radixlm.config.schema import Config
from radixlm.device import null as null_device
from radixlm.device.select import choose, open_device
from radixlm.memory.budget import MAX_RUNNING
from radixlm.parallel.base import Place
from radixlm.parallel.local import ALONE
from radixlm.runner.base import Executor
from radixlm.runner.identity import identify, limit_context
from radixlm.runner.journal import Journal, Report
from radixlm.runner.null import NullRunner
from radixlm.runner.vocabulary import Vocabulary, read_vocabulary

#: The null device: context where the config says nothing, tokens in its pool at most, share of tokens that end a text,
#: steps between two full checks.
NULL_CONTEXT, NULL_POOL, NULL_END, NULL_VERIFY = 8192, 1 << 20, 1 / 256, 64


BY_ITSELF = Place()


@dataclass(frozen=True, slots=True)
class Booted:
    """A runner that is ready.

    Attributes:
        config: the configuration with everything filled that follows from the device.
        abort: ends what a step waits for when another rank is gone; for another thread to call.
    """

    runner: Executor
    facts: EngineFacts
    config: Config
    abort: Callable[[], None] = ALONE.abort


def boot(config: Config, report: Report, place: Place = BY_ITSELF, meet: Callable[[], None] | None = None) -> Booted:
    """Start the runner that a configuration asks for.

    Args:
        report: hears (stage, fraction of it that is done).
        place: as which of several ranks, all of which boot at the same time with the same configuration (see
            `launch.ranks`).
        meet: called when this rank is ready to meet the others; returns when all of them are.

    Raises:
        StartupError: it cannot start; the message says why and what to do.
    """
    if config.device.tensor_parallel_size != place.size:
        raise StartupError(
            f"--tensor-parallel-size is {config.device.tensor_parallel_size}, and {place.size} rank is started here",
            param="tensor_parallel_size",
        )
    journal = Journal(report)
    if config.device.device == "null":
        return _boot_null(config, journal)
    with journal.stage("torch"):
        env.calm_threads()
        from radixlm.models import table
        from radixlm.parallel.select import connect
        from radixlm.runner.build import build
        from radixlm.runner.build_encoder import build_encoder
    with journal.stage("device"):
        choice = choose(config.device.device)
        device = open_device(choice, place.rank, place.size)
    journal.decide("device", choice.name, choice.reason)
    checkpoint, vocabulary = _find(config, journal)
    if table.is_encoder(checkpoint.config):
        if place.size > 1:
            raise StartupError("an encoder is not cut into ranks: leave out --tensor-parallel-size")
        encoder = build_encoder(config, checkpoint, vocabulary, device, journal)
        config = _settle(_without_prefixes(config, journal), choice.name, 1, "no pages are kept", journal)
        return Booted(encoder, encoder.facts, config)
    if meet is not None:
        with journal.stage("ranks"):
            meet()
    comm = connect(place, device.torch_device)
    runner, page_size, page_reason = build(config, checkpoint, vocabulary, device, comm, journal)
    config = _settle(config, choice.name, page_size, page_reason, journal)
    return Booted(runner, runner.facts, config, comm.abort)


def _find(config: Config, journal: Journal) -> tuple[Checkpoint, Vocabulary]:
    with journal.stage("model files"):
        model = config.model
        checkpoint = locate(model.model, model.revision, model.tokenizer_path, journal.report)
        return checkpoint, read_vocabulary(checkpoint)


def _without_prefixes(config: Config, journal: Journal) -> Config:
    """An encoder's states depend on the whole text: there is nothing to share."""
    journal.decide("disable_radix_cache", True, "an encoder reads whole texts; no prefix of one can be reused")
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, disable_radix_cache=True, page_size=1))


def _settle(config: Config, kind: str, page_size: int, page_reason: str, journal: Journal) -> Config:
    """Fill what follows from the device. The journal's decisions are what the facts hold: they hear of it too."""
    if config.cache.page_size is None:
        config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, page_size=page_size))
        journal.decide("page_size", page_size, page_reason)
    config, reasons = derive(config, kind)
    for name, (value, reason) in reasons.items():
        if name != "device":
            journal.decide(name, value, reason)
    return config


def _boot_null(config: Config, journal: Journal) -> Booted:
    """A runner that makes tokens up, in the shape of the model."""
    journal.decide("device", "null", "asked for")
    checkpoint, vocabulary = _find(config, journal)
    said = checkpoint.config.get("max_position_embeddings")
    context = limit_context(config, said if isinstance(said, int) else NULL_CONTEXT, checkpoint.name)
    vocab = checkpoint.config.get("vocab_size", vocabulary.size)
    if not isinstance(vocab, int):
        raise StartupError(f"{checkpoint.directory} does not say how large its vocabulary is (vocab_size)")
    page_size = config.cache.page_size or 1
    rows = config.schedule.max_running_requests or MAX_RUNNING
    pages = (config.cache.max_total_tokens or min(NULL_POOL, rows * context)) // page_size
    if pages < 1:
        raise StartupError(
            f"--max-total-tokens {config.cache.max_total_tokens} is less than a page of {page_size} tokens"
        )
    config = _settle(config, "null", page_size, "prefixes can be shared up to any token", journal)
    facts = EngineFacts(
        model=identify(
            config,
            checkpoint,
            vocabulary,
            dtype="float32",
            vocab_size=vocab,
            context_length=min(context, pages * page_size),
        ),
        device=null_device.facts(),
        pool=PoolFacts(pages=pages, page_size=page_size, max_running=rows, bytes=0),
        decisions=journal.decisions,
        timings=journal.timings,
    )
    return Booted(NullRunner(facts, end_probability=NULL_END, verify_every=NULL_VERIFY), facts, config)
