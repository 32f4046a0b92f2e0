"""This module owns what a model is called and how far it reaches: facts that every runner takes from the checkpoint."""

from __future__ import annotations

from radixlm.base.errors import StartupError
from radixlm.base.facts import ModelFacts
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.checkpoint.pooling import pooling
from radixlm.config.schema import Config
from radixlm.runner.vocabulary import Vocabulary


def limit_context(config: Config, models: int, name: str) -> int:
    """The longest sequence: what was asked for, at most what the model was made for."""
    asked = config.model.context_length
    if asked is None:
        return models
    if not 0 < asked <= models:
        raise StartupError(f"--context-length is {asked}; {name} was made for 1 to {models} positions")
    return asked


def identify(
    config: Config, checkpoint: Checkpoint, vocabulary: Vocabulary, *, dtype: str, vocab_size: int, context_length: int
) -> ModelFacts:
    """Facts of a model whose output has `vocab_size` ids; sizes of weights are 0 until somebody fills them in."""
    named = checkpoint.config.get("architectures")
    sampled = min(vocabulary.size or vocab_size, vocab_size)
    return ModelFacts(
        name=config.model.served_model_name or checkpoint.name,
        path=str(checkpoint.directory),
        architecture=str(named[0]) if isinstance(named, list) and named else "unknown",
        dtype=dtype,
        parameters=0,
        layers=0,
        hidden_size=0,
        vocab_size=vocab_size,
        sampled_vocab_size=sampled,
        eos_ids=tuple(token for token in vocabulary.eos_ids if token < sampled),
        bos_id=vocabulary.bos_id,
        context_length=context_length,
        kv_bytes_per_token=0,
        weight_bytes=0,
        pooling=pooling(checkpoint),
    )
