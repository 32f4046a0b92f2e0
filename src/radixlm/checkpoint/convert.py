"""This module owns the conversion of a GGUF file into a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from radixlm.base.errors import StartupError
from radixlm.checkpoint import safetensors
from radixlm.checkpoint.gguf import Gguf, open_gguf
from radixlm.checkpoint.gguf_config import hf_config
from radixlm.checkpoint.gguf_tokenizer import tokenizer_files
from radixlm.checkpoint.gguf_weights import Weight, weights

#: Part of the name of every converted directory: raise it when the output changes, and old ones are not used any more.
CONVERTER_VERSION = 1

_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def convert(source: Path, target: Path, *, tokenizer: bool, report: Callable[[float], None]) -> None:
    """Write the model in `source` into the existing directory `target`.

    Weights are dequantised to bfloat16, or kept in the float type that the file has. One slab of rows is in memory
    at a time.

    Args:
        tokenizer: write tokenizer and chat template too. Without them, the vocabulary need not be of a known kind.
        report: hears the fraction done.

    Raises:
        StartupError: the file is damaged, not supported, or there is no room for the result.
    """
    gguf = open_gguf(source)
    config = hf_config(gguf)
    found = weights(gguf, config)
    dtype = _dtype(found)
    streams = [safetensors.Stream(weight.name, weight.info.shape, weight.slabs) for weight in found]
    _check_room(source, target, safetensors.total_bytes(streams, dtype))
    config["torch_dtype"] = _TORCH_NAMES[dtype]
    if tokenizer:
        tokenizer_json, tokenizer_config, generation_config = tokenizer_files(gguf)
        tokenizer_config["model_max_length"] = config["max_position_embeddings"]
        config |= generation_config
        _write_json(target / "tokenizer.json", tokenizer_json)
        _write_json(target / "tokenizer_config.json", tokenizer_config, indent=2)
        _write_json(target / "generation_config.json", generation_config, indent=2)
    _write_json(target / "config.json", config, indent=2)
    _write_json(target / "source.json", _origin(gguf), indent=2)
    safetensors.write(target / "model.safetensors", streams, dtype, report)


def _dtype(found: list[Weight]) -> str:
    """The float type of the matrices if they all have the same, else BF16."""
    kinds = {weight.info.kind for weight in found if len(weight.info.shape) > 1}
    return kinds.pop() if len(kinds) == 1 and kinds <= set(_TORCH_NAMES) else "BF16"


def _check_room(source: Path, target: Path, needed: int) -> None:
    free = shutil.disk_usage(target).free
    if needed > free:
        raise StartupError(
            f"converting {source} needs {needed / 1e9:.1f} GB in {target.parent}, and {free / 1e9:.1f} GB are free; "
            "RADIXLM_CACHE names another directory"
        )


def _origin(gguf: Gguf) -> dict[str, Any]:
    """What people want to know of a directory they find in the cache."""
    facts = {key: gguf.metadata.get(f"general.{key}") for key in ("name", "architecture", "license", "basename")}
    return {"file": str(gguf.path), **{key: value for key, value in facts.items() if isinstance(value, str)}}


def _write_json(path: Path, content: Any, indent: int | None = None) -> None:
    # json.dumps runs in C; json.dump into a file does not.
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent), encoding="utf-8")
