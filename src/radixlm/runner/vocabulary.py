"""This module owns what the runner must know of the tokenizer: how many ids are tokens, and which of them end a text.

`tokenizer.json` is read for this alone, without building a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from radixlm.base.errors import StartupError
from radixlm.checkpoint.checkpoint import Checkpoint


class _Added(msgspec.Struct, frozen=True):
    id: int
    content: str


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _TokenizerFile(msgspec.Struct, frozen=True):
    model: _Model = _Model()
    added_tokens: list[_Added] = []


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """
    Attributes:
        size: first id that is no token; None if there is no tokenizer.
        eos_ids: without repetition, the ones named by generation_config first.
    """

    size: int | None
    eos_ids: tuple[int, ...]
    bos_id: int | None


def read_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """The vocabulary of a checkpoint. Raises `StartupError` if its tokenizer.json cannot be read."""
    ids = {} if checkpoint.tokenizer_file is None else _tokens(checkpoint.tokenizer_file)
    sources = (checkpoint.generation_config, checkpoint.config)
    named = checkpoint.tokenizer_config
    ends = [token for source in sources for token in _ids(source.get("eos_token_id"))]
    starts = [token for source in sources for token in _ids(source.get("bos_token_id"))]
    return Vocabulary(
        size=max(ids.values()) + 1 if ids else None,
        eos_ids=tuple(dict.fromkeys((*ends, *_named(named, "eos_token", ids)))),
        bos_id=next(iter((*_named(named, "bos_token", ids), *starts)), None),
    )


def _tokens(file: Path) -> dict[str, int]:
    try:
        content = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
    except OSError as error:
        raise StartupError(f"cannot read {file}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise StartupError(f"{file} is not a tokenizer: {error}") from None
    vocab = content.model.vocab
    ids = dict(vocab) if isinstance(vocab, dict) else {token: i for i, (token, _) in enumerate(vocab)}
    return ids | {added.content: added.id for added in content.added_tokens}


def _ids(value: Any) -> list[int]:
    values: Iterable[Any] = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool)]


def _named(tokenizer_config: Mapping[str, Any], key: str, ids: Mapping[str, int]) -> list[int]:
    token = tokenizer_config.get(key)
    return [ids[token]] if isinstance(token, str) and token in ids else []
