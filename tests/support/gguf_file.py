"""GGUF files written by hand, right and wrong, and the small model that a few of them hold."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: Sequence[int], kind: int = 0, offset: int = 0, rank: int | None = None) -> bytes:
    count = len(dims) if rank is None else rank
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


def header(pairs: Sequence[bytes] = (), tensors: Sequence[bytes] = (), version: int = 3) -> bytes:
    """A whole file whose tensors have no data unless it is appended."""
    body = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return body + b"\0" * (-len(body) % 32)


def write_model(
    path: Path,
    architecture: str,
    weights: Mapping[str, Array],
    numbers: Mapping[str, Any],
    tokenizer: Mapping[str, Any] | None = None,
) -> Path:
    """Write with the `gguf` package. `numbers` go under the architecture, `tokenizer` under `tokenizer.ggml`."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), architecture)
    for key, value in numbers.items():
        _add(writer, f"{architecture}.{key}", value)
    for key, value in (tokenizer or {}).items():
        _add(writer, key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}", value)
    for name, values in weights.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


#: A decoder of one layer: width 8, 2 heads of 4, 1 kv head.
NUMBERS: Mapping[str, Any] = {
    "embedding_length": 8,
    "feed_forward_length": 16,
    "block_count": 1,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "context_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


def small_weights(vocab: int = 300, seed: int = 0) -> dict[str, Array]:
    """Its tensors under their GGUF names, float32."""
    random = np.random.default_rng(seed)
    shapes = {
        "token_embd.weight": (vocab, 8), "output_norm.weight": (8,),
        "blk.0.attn_norm.weight": (8,), "blk.0.ffn_norm.weight": (8,),
        "blk.0.attn_q.weight": (8, 8), "blk.0.attn_k.weight": (4, 8), "blk.0.attn_v.weight": (4, 8),
        "blk.0.attn_output.weight": (8, 8), "blk.0.ffn_gate.weight": (16, 8), "blk.0.ffn_up.weight": (16, 8),
        "blk.0.ffn_down.weight": (8, 16),
    }  # fmt: skip
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def scored_tokenizer(extra: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: control tokens, bytes, letters, a few words."""
    control = ["<unk>", "<s>", "</s>"]
    words = ["▁", "a", "b", "▁a", "ab", "▁ab", *extra]
    types = [2, 3, 3, *[6] * 256, *[1] * 6, *[6 if word.startswith("<0x") else 1 for word in extra]]
    return {
        "model": "llama",
        "tokens": control + BYTE_TOKENS + words,
        "scores": [0.0] * 259 + [-float(index) for index in range(len(words))],
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **more,
    }


def byte_level_tokenizer(pre: str, **more: Any) -> dict[str, Any]:
    """A GPT-2 vocabulary: all bytes, a few merges, ChatML's control words."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(byte) for byte in visible] + [chr(256 + index) for index in range(256 - len(visible))]
    merges = ["Ġ a", "a b", "Ġa b", "1 2", "12 3", "d o", "do g"]
    tokens = letters + [merge.replace(" ", "") for merge in merges] + ["<|im_start|>", "<|im_end|>", "[PAD]"]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 3) + [3, 3, 5],
        "merges": merges,
        "bos_token_id": len(tokens) - 3,
        "eos_token_id": len(tokens) - 2,
        **more,
    }
