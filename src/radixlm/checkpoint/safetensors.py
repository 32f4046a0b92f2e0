"""This module owns the writing of a safetensors file from streams of values, one slab in memory at a time.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from radixlm.checkpoint.dequantize import Floats, to_bfloat16


@dataclass(frozen=True, slots=True)
class Stream:
    """A tensor to write: its values arrive in order, in pieces of any size."""

    name: str
    shape: tuple[int, ...]
    values: Callable[[], Iterable[Floats]]


def _to_float16(values: Floats) -> npt.NDArray[np.float16]:
    return values.astype("<f2")


def _to_float32(values: Floats) -> Floats:
    return np.ascontiguousarray(values, "<f4")


_ENCODERS: Mapping[str, tuple[int, Callable[[Floats], npt.NDArray[np.generic]]]] = {
    "BF16": (2, to_bfloat16),
    "F16": (2, _to_float16),
    "F32": (4, _to_float32),
}


def total_bytes(streams: Iterable[Stream], dtype: str) -> int:
    return sum(math.prod(stream.shape) for stream in streams) * _ENCODERS[dtype][0]


def write(path: Path, streams: list[Stream], dtype: str, report: Callable[[float], None]) -> None:
    """Write all tensors as `dtype` (BF16, F16 or F32). `report` hears the fraction done after each."""
    itemsize, encode = _ENCODERS[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for stream in streams:
        start, end = end, end + math.prod(stream.shape) * itemsize
        header[stream.name] = {"dtype": dtype, "shape": list(stream.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        body = file.tell()
        written = 0
        for stream in streams:
            for values in stream.values():
                written += file.write(encode(values).data)
            report(written / end)
        if file.tell() - body != end:
            raise ValueError(f"{path}: {file.tell() - body} bytes written, {end} announced")
