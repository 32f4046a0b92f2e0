"""This module owns the reading of a Hugging Face directory: its JSON files and the list of its weight files."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from radixlm.base.errors import StartupError
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.checkpoint.hf_config import normalise

MAX_JSON_BYTES = 64 << 20
_INDEX = "model.safetensors.index.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

_log = logging.getLogger(__name__)


def read_directory(path: Path, name: str, source: Literal["safetensors", "gguf"] = "safetensors") -> Checkpoint:
    """Everything about the model in `path` but the contents of its weights.

    Args:
        source: what the weights were before they were here.

    Raises:
        StartupError: no config.json, or a file that is not what it should be.
    """
    if not (path / "config.json").is_file():
        raise StartupError(
            f"{path} holds no config.json, so it is not a model directory; "
            "give a directory in Hugging Face layout, a .gguf file, a hub id or the name of a packaged model"
        )
    config = normalise(read_json(path / "config.json"))
    files, index = weight_files(path)
    tokenizer = path / "tokenizer.json"
    return Checkpoint(
        name=name,
        directory=path,
        format=source if files else "none",
        config=config,
        generation_config=_optional(path / "generation_config.json"),
        tokenizer_file=tokenizer if tokenizer.is_file() else None,
        tokenizer_config=read_tokenizer_config(path),
        weight_files=files,
        weight_index=index,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `StartupError` naming the file if there is none."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise StartupError(f"{path} has {path.stat().st_size} bytes; {MAX_JSON_BYTES} are allowed")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise StartupError(f"{path} must hold a JSON object, and holds {type(content).__name__}")
    return content


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json, completed from the other files that may hold special tokens and chat templates."""
    config = _optional(path / "tokenizer_config.json")
    fallback = _optional(path / "special_tokens_map.json")
    for key in _SPECIAL_TOKENS:
        value = config.get(key) or fallback.get(key)
        config[key] = value.get("content") if isinstance(value, dict) else value
    config["chat_template"] = _chat_template(path, config.get("chat_template"))
    return {key: value for key, value in config.items() if value is not None}


def _chat_template(path: Path, inline: Any) -> Any:
    """The template of a file of its own goes first. Named ones become a mapping; `default` is the unnamed one."""
    named = {}
    if isinstance(inline, list):
        pairs = [item for item in inline if isinstance(item, dict)]
        named = {str(item.get("name")): item["template"] for item in pairs if isinstance(item.get("template"), str)}
    elif isinstance(inline, str):
        named = {"default": inline}
    if (path / "chat_template.json").is_file():
        text = read_json(path / "chat_template.json").get("chat_template")
        named |= {"default": text} if isinstance(text, str) else {}
    extra = sorted((path / "additional_chat_templates").glob("*.jinja"))
    for file in [*extra, path / "chat_template.jinja"]:
        if file.is_file():
            named["default" if file.parent == path else file.stem] = read_text(file)
    return named["default"] if set(named) == {"default"} else named or None


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise StartupError(f"cannot read {path}: {reason}") from None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def weight_files(path: Path) -> tuple[tuple[Path, ...], Mapping[str, str]]:
    """The safetensors files that make up the model, and the index if there is one.

    With an index its files count, whether they are there or not; without, `model.safetensors` alone, else every
    `model*.safetensors`, else every `*.safetensors`. What is left over is named in the log.
    """
    present = sorted(file for file in path.glob("*.safetensors") if file.is_file())
    index: dict[str, str] = {}
    if (path / _INDEX).is_file():
        index = _read_index(path / _INDEX)
        chosen = [path / name for name in sorted(set(index.values()))]
    elif path / "model.safetensors" in present:
        chosen = [path / "model.safetensors"]
    else:
        chosen = [file for file in present if file.name.startswith("model")] or present
    stray = [file.name for file in present if file not in chosen]
    if stray:
        _log.warning("%s: ignoring %s, not part of the model's weights", path, ", ".join(stray))
    return tuple(chosen), index


def pickled_weights(path: Path) -> list[str]:
    """Names of weight files that are pickles. They are never opened."""
    patterns = ("pytorch_model*.bin", "model*.bin", "*.pth", "*.pt")
    return sorted({file.name for pattern in patterns for file in path.glob(pattern)})


def _read_index(path: Path) -> dict[str, str]:
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise StartupError(f"{path} holds no weight_map of tensor names to file names")
    outside = [name for name in index.values() if Path(name).name != name]
    if outside:
        raise StartupError(f"{path} names {outside[0]!r}; weight files lie in the same directory")
    return index
