"""This module owns `Checkpoint`: where a model's files are and what its small ones say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model found on disk. Weights are not opened.

    Attributes:
        name: what people call the model: short name, hub id, or name of the directory or file.
        directory: a Hugging Face directory; for GGUF the converted one.
        format: what the user's files are; `none` has no weights (random ones can be made from the config).
        config: `config.json`, normalised (see `hf_config`).
        generation_config: `generation_config.json`, or empty.
        tokenizer_file: `tokenizer.json`, or None where there is none.
        tokenizer_config: `tokenizer_config.json` with special tokens as plain strings and `chat_template` either a
            string or a mapping of names to strings, wherever the directory keeps it.
        weight_files: safetensors files, in order of name.
        weight_index: tensor -> file name, from a sharded checkpoint's index; empty if there is none.
    """

    name: str
    directory: Path
    format: Literal["safetensors", "gguf", "none"]
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_file: Path | None = None
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    weight_files: tuple[Path, ...] = ()
    weight_index: Mapping[str, str] = field(default_factory=dict)
