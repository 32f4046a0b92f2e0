"""GGUF headers: the reader against the `gguf` package, and against files made to hurt."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixlm.base.errors import StartupError
from radixlm.checkpoint import dequantize
from radixlm.checkpoint.dequantize import slabs, to_float32
from radixlm.checkpoint.gguf import TENSOR_TYPES, TensorInfo, open_gguf
from support.gguf_file import NUMBERS, header, pair, scored_tokenizer, small_weights, tensor, text, write_model


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def numbers(code: str, *values: float) -> bytes:
    return struct.pack("<" + code, *values)


def test_reads_what_the_reference_package_wrote(tmp_path: Path) -> None:
    weights, tokenizer = small_weights(), scored_tokenizer(["čtyři", "漢字"])
    path = write_model(tmp_path / "m.gguf", "llama", weights, NUMBERS, tokenizer)
    found = open_gguf(path)
    reference = gguf.GGUFReader(path)
    for key, field in reference.fields.items():
        if not key.startswith("GGUF."):
            ours = found.metadata[key]
            assert (ours.tolist() if isinstance(ours, np.ndarray) else ours) == field.contents(), key
    assert list(found.tensors) == [item.name for item in reference.tensors]
    for name, info in found.tensors.items():
        assert info.shape == weights[name].shape
        np.testing.assert_array_equal(np.concatenate(list(slabs(info))).reshape(info.shape), weights[name])


def test_sizes_of_blocks_are_those_of_the_format() -> None:
    for number, (name, block, size) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (block, size))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"])
def test_slabs_are_the_reference_dequantisation(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = gguf.GGMLQuantizationType[kind]
    _, block, size = TENSOR_TYPES[number.value]
    random = np.random.default_rng(1)
    raw = random.integers(0, 0x3C, 7 * 3 * size * 256 // block, dtype=np.uint8)  # no half-precision scale is infinite
    info = TensorInfo("t", (7, 3 * 256), kind, raw.reshape(7, -1))
    monkeypatch.setattr(dequantize, "SLAB", 2 * 3 * 256)
    whole = gguf.quants.dequantize(info.raw, number)
    pieces = list(slabs(info))
    assert [len(piece) for piece in pieces] == [2, 2, 2, 1]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    order = random.permutation(7)
    np.testing.assert_array_equal(np.concatenate(list(slabs(info, order))), whole[order])
    np.testing.assert_array_equal(to_float32(info.raw[:1], kind), whole[:1])


def test_a_model_in_parts_is_one_model(tmp_path: Path) -> None:
    data = np.arange(8, dtype="<f4").tobytes()
    count = pair("split.count", 2, numbers("H", 2))
    write(tmp_path / "m-00001-of-00002.gguf", header([count], [tensor("a", [8])]) + data)
    with pytest.raises(StartupError, match=r"m-00002-of-00002\.gguf is not beside it"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")
    write(tmp_path / "m-00002-of-00002.gguf", header([count], [tensor("b", [4, 2])]) + data)
    found = open_gguf(tmp_path / "m-00001-of-00002.gguf")
    assert {name: info.shape for name, info in found.tensors.items()} == {"a": (8,), "b": (2, 4)}
    with pytest.raises(StartupError, match="name the first"):
        open_gguf(tmp_path / "m-00002-of-00002.gguf")


MANY = 2**40
HOSTILE = {
    "a dimension of 0": (header([], [tensor("t", [0])]), "dimensions"),
    "dimensions whose product overflows": (header([], [tensor("t", [2**62] * 4)]), "dimensions"),
    "dimensions larger than the file": (header([], [tensor("t", [2**20, 2**20])]), "ends at byte"),
    "a million dimensions": (header([], [tensor("t", [1], rank=1_000_000)]), "1000000 dimensions"),
    "no dimensions": (header([], [tensor("t", [], rank=0)]), "0 dimensions"),
    "a string of a gigabyte": (header([pair("k", 8, numbers("Q", 2**30))]), "is 1073741824 bytes long"),
    "a string in a list of a gigabyte": (header([pair("k", 9, numbers("IQQ", 8, 1, 2**30))]), "1073741824 bytes long"),
    "a key of a gigabyte": (header([numbers("Q", 2**30) + b"\0" * 32]), "a key is 1073741824 bytes long"),
    "an alignment of a gigabyte": (header([pair("general.alignment", 4, numbers("I", 2**30))]), "alignment"),
    "an alignment of 0": (header([pair("general.alignment", 4, numbers("I", 0))]), "alignment"),
    "an alignment that is text": (header([pair("general.alignment", 8, text("32"))]), "alignment"),
    "an empty key": (header([pair("", 4, numbers("I", 1))]), "a key is empty"),
    "a key twice": (header([pair("k", 4, numbers("I", 1))] * 2), "twice"),
    "a list of 2**40 numbers": (header([pair("k", 9, numbers("IQ", 4, MANY))]), "array of 1099511627776 items"),
    "a list of 2**40 strings": (header([pair("k", 9, numbers("IQ", 8, MANY))]), "1099511627776 strings"),
    "a list of lists": (header([pair("k", 9, numbers("IQ", 9, 1))]), "unsupported type 9"),
    "2**40 tensors": (b"GGUF" + numbers("IQQ", 3, MANY, 0), "1099511627776 tensors"),
    "2**40 keys": (b"GGUF" + numbers("IQQ", 3, 0, MANY), "1099511627776 keys"),
    "an unknown type of value": (header([pair("k", 77, b"")]), "value type 77"),
    "an unknown type of tensor": (header([], [tensor("t", [32], kind=999)]), "unsupported type 999"),
    "an offset past the end": (header([], [tensor("t", [1], offset=2**63)]), "ends at byte"),
    "rows that are no whole blocks": (header([], [tensor("t", [33], kind=2)]), "not a multiple of 32"),
    "a tensor twice": (header([], [tensor("t", [1])] * 2) + b"\0" * 64, "twice"),
    "version 1": (header(version=1), "version is 1"),
    "another byte order": (header(version=3 << 24), "big-endian"),
    "another format": (b"PK\3\4" + b"\0" * 64, "does not begin with GGUF"),
    "nothing": (b"", "has 0 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_at_once(name: str, tmp_path: Path) -> None:
    data, words = HOSTILE[name]
    path = write(tmp_path / "bad.gguf", data)
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(StartupError, match=words) as caught:
        open_gguf(path)
    seconds = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in caught.value.message
    assert seconds < 1 and peak < 1 << 20


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_an_error_or_harmless(data: st.DataObject, tmp_path: Path) -> None:
    good = (
        header(
            [pair("general.alignment", 4, numbers("I", 32)), pair("name", 8, text("m")),
             pair("list", 9, numbers("IQ", 8, 2) + text("ab") + text("č")),
             pair("numbers", 9, numbers("IQ3f", 6, 3, 1, 2, 3))],
            [tensor("a", [32, 2]), tensor("b", [32], kind=8, offset=256)],
        )
        + b"\1" * 290
    )  # fmt: skip
    damaged = bytearray(good[: data.draw(st.integers(0, len(good)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = write(tmp_path / "m.gguf", bytes(damaged))
    try:
        found = open_gguf(path)
    except StartupError:
        return
    assert all(info.raw.size <= len(good) for info in found.tensors.values())
