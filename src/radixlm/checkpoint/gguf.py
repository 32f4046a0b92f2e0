"""This module owns the reading of GGUF headers. Every length in a file is checked before it is believed.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from radixlm.base.errors import StartupError

Bytes = npt.NDArray[np.uint8]

MAX_KEY_BYTES = 65_535  # the format's own limit
MAX_DIMS = 4
MAX_DIM = 1 << 40
MAX_ALIGNMENT = 1 << 16
MAX_STRINGS = 1 << 24  # in one array; the largest vocabularies have 2**18

#: Type number in the file -> (name, values in a block, bytes of a block).
TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip

#: Number of a scalar type -> its `struct` and numpy code.
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the file. `shape` is row-major as in torch (the file lists dimensions the other way round).

    Attributes:
        kind: GGML type, e.g. `Q4_1`.
        raw: [rows, bytes of a row], a view of the mapped file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    raw: Bytes


@dataclass(frozen=True, slots=True)
class Gguf:
    """A model as GGUF tells it; a model split over several files is one of these.

    Attributes:
        metadata: key -> number, bool, str, list of str, or numpy array of numbers.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def open_gguf(path: Path) -> Gguf:
    """Read the header of `path` and, if it is the first of several parts, of the others. Tensors are mapped, not read.

    Raises:
        StartupError: the file is not GGUF, is damaged, or a part is missing.
    """
    metadata, tensors = _read(path)
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        match = _PART.match(path.name)
        if match is None or int(match["parts"]) != parts or int(match["part"]) != 1:
            raise StartupError(
                f"{path} is one of {parts} parts; name the first, which ends in -00001-of-{parts:05d}.gguf"
            )
        for part in range(2, parts + 1):
            sibling = path.with_name(f"{match['stem']}-{part:05d}-of-{parts:05d}.gguf")
            if not sibling.is_file():
                raise StartupError(f"{path} is the first of {parts} parts, and part {sibling.name} is not beside it")
            for name, info in _read(sibling)[1].items():
                if name in tensors:
                    raise StartupError(f"{sibling} holds tensor {name!r} again; an earlier part has it")
                tensors[name] = info
    return Gguf(path, metadata, tensors)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise StartupError(f"{path} is not a GGUF file: it has {path.stat().st_size} bytes")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    return _Header(path, data).read()


class _Header:
    """A cursor over the header. `at` never passes the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.end = len(data)
        self.at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self.data[:4] != b"GGUF":
            raise StartupError(f"{self.path} is not a GGUF file: it does not begin with GGUF")
        self.at = 4
        version = self.number("I")
        if version not in (2, 3):
            big_endian = " (a big-endian file?)" if version and not version & 0xFFFF else ""
            self.bad(f"its version is {version}{big_endian}; versions 2 and 3 are read")
        tensor_count, pair_count = self.number("Q"), self.number("Q")
        # The smallest tensor entry takes 32 bytes, the smallest pair 14.
        if tensor_count * 32 + pair_count * 14 > self.end - self.at:
            self.bad(
                f"it announces {tensor_count} tensors and {pair_count} keys, more than its {self.end} bytes can hold"
            )
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self.string(MAX_KEY_BYTES, "a key")
            if not key or key in metadata:
                self.bad(f"key {key!r} is there twice" if key else "a key is empty")
            metadata[key] = self.value(key, self.number("I"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8 or alignment > MAX_ALIGNMENT:
            self.bad(f"general.alignment is {alignment}; it must be a multiple of 8, at most {MAX_ALIGNMENT}")
        entries = [self.tensor_entry() for _ in range(tensor_count)]
        base = self.at + -self.at % alignment
        tensors: dict[str, TensorInfo] = {}
        for name, dims, kind, offset in entries:
            if name in tensors:
                self.bad(f"tensor {name!r} is there twice")
            tensors[name] = self.place(name, dims, kind, base + offset)
        return metadata, tensors

    def bad(self, reason: str) -> NoReturn:
        raise StartupError(f"{self.path} is a damaged or unsupported GGUF file: {reason}")

    def take(self, size: int, what: str) -> int:
        """Move past `size` bytes; returns where they start."""
        start = self.at
        if size > self.end - start:
            self.bad(f"{what} takes {size} bytes at {start}, and the file ends at {self.end}")
        self.at = start + size
        return start

    def number(self, code: str) -> Any:
        start = self.take(struct.calcsize("<" + code), "a number")
        return struct.unpack_from("<" + code, self.data, start)[0]

    def string(self, limit: int, what: str) -> str:
        size = self.number("Q")
        if size > limit:
            self.bad(f"{what} is {size} bytes long")
        start = self.take(size, what)
        return str(self.data[start : start + size], "utf-8", "replace")

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.string(self.end, f"the value of {key!r}")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            self.bad(f"{key!r} has the unknown value type {kind}")
        return self.number(_SCALARS[kind])

    def array(self, key: str) -> Any:
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return self.strings(key, count)
        if kind not in _SCALARS:
            self.bad(f"{key!r} is an array of the unsupported type {kind}")
        dtype = np.dtype("<" + _SCALARS[kind])
        start = self.take(count * dtype.itemsize, f"the array of {count} items {key!r}")
        return np.frombuffer(self.data, dtype, count, start) if count else np.empty(0, dtype)

    def strings(self, key: str, count: int) -> list[str]:
        if count > MAX_STRINGS or count * 8 > self.end - self.at:
            self.bad(f"{key!r} announces {count} strings")
        # The vocabulary: hundreds of thousands of short strings, so nothing is called per string that need not be.
        data, end, at = self.data, self.end, self.at
        length_at = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            if at + 8 > end:
                self.bad(f"the file ends within {key!r}")
            (size,) = length_at(data, at)
            at += 8
            if size > end - at:
                self.bad(f"a string of {key!r} is {size} bytes long, and the file ends at {end}")
            found.append(str(data[at : at + size], "utf-8", "replace"))
            at += size
        self.at = at
        return found

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string(MAX_KEY_BYTES, "a tensor's name")
        rank = self.number("I")
        if not 1 <= rank <= MAX_DIMS:
            self.bad(f"tensor {name!r} has {rank} dimensions; 1 to {MAX_DIMS} are allowed")
        dims = tuple(self.number("Q") for _ in range(rank))
        if not all(1 <= dim <= MAX_DIM for dim in dims):
            self.bad(f"tensor {name!r} has the dimensions {dims}")
        return name, dims, self.number("I"), self.number("Q")

    def place(self, name: str, dims: tuple[int, ...], kind: int, start: int) -> TensorInfo:
        if kind not in TENSOR_TYPES:
            self.bad(f"tensor {name!r} has the unsupported type {kind}")
        label, block, block_bytes = TENSOR_TYPES[kind]
        if dims[0] % block:
            self.bad(f"tensor {name!r} of type {label} has rows of {dims[0]}, not a multiple of {block}")
        rows, row_bytes = math.prod(dims[1:]), dims[0] // block * block_bytes
        if start + rows * row_bytes > self.end:
            self.bad(f"tensor {name!r} ends at byte {start + rows * row_bytes}, and the file at {self.end}")
        raw = np.frombuffer(self.data, np.uint8, rows * row_bytes, start).reshape(rows, row_bytes)
        return TensorInfo(name, dims[::-1], label, raw)
