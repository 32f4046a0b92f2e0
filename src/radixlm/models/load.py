"""This module owns how a model's tensors come out of files, or out of a random generator."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from radixlm.base.errors import StartupError
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.checkpoint.directory import pickled_weights
from radixlm.models.base import Weights
from radixlm.parallel.shares import Cut

#: What multimodal checkpoints put before the names of their language model, and what it is without.
_TEXT_PREFIXES: Mapping[str, str] = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}

#: Standard deviation of random matrices: the usual `initializer_range`.
_RANDOM_STD = 0.02


class SafetensorsWeights:
    """Tensors of safetensors files. Files are mapped: a tensor's bytes are read when it is used."""

    def __init__(self, files: Sequence[Path], index: Mapping[str, str] | None = None) -> None:
        """Open every file and read its header.

        Args:
            index: tensor -> file name where a checkpoint has such a list; tensors that are not in it do not count.

        Raises:
            StartupError: a file is missing or damaged, or the files contradict each other or the index.
        """
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise StartupError(f"{files[0].parent} is incomplete: weight file {', '.join(missing)} is missing")
        self._readers: dict[str, tuple[Path, str, Any]] = {}
        for file in files:
            reader = _open(file)
            for stored in reader.keys():  # noqa: SIM118 - not a mapping
                if index and index.get(stored) != file.name:
                    continue
                name = _text_name(stored)
                if name in self._readers:
                    raise StartupError(f"tensor {name!r} is both in {self._readers[name][0]} and in {file}")
                self._readers[name] = (file, stored, reader)
        if index and (lost := [stored for stored in index if _text_name(stored) not in self._readers]):
            raise StartupError(f"{files[0].parent}: {index[lost[0]]} does not hold {lost[0]!r}, which the index says")

    def names(self) -> frozenset[str]:
        return frozenset(self._readers)

    def get(self, name: str, shape: tuple[int, ...] | None = None, part: Cut | None = None) -> torch.Tensor:
        found = self._readers.get(name)
        if found is None:
            raise StartupError(f"the checkpoint holds no tensor {name!r}; its config.json is not of these weights")
        file, stored, reader = found
        try:
            stored_shape = tuple(reader.get_slice(stored).get_shape())
            if shape is not None and stored_shape != shape:
                raise StartupError(
                    f"tensor {name!r} of {file} has the shape {list(stored_shape)}, and the config asks for "
                    f"{list(shape)}"
                )
            tensor: torch.Tensor = reader.get_tensor(stored) if part is None else _read(reader, stored, part)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise StartupError(f"cannot read tensor {name!r} of {file}: {error}") from None
        return tensor


class DummyWeights:
    """Random weights for every tensor that is asked for: for benchmarks of sizes, not of answers.

    A tensor depends on the seed and its name alone, not on what was asked for before. Matrices are normal with a
    standard deviation of 0.02; vectors are 1 where they are a norm's, else 0.
    """

    def __init__(self, dtype: torch.dtype, seed: int, device: torch.device | None = None) -> None:
        """
        Args:
            device: where they are drawn, and so which numbers they are (the CPU's by default).
        """
        self._dtype = dtype
        self._seed = seed
        self._device = device or torch.device("cpu")

    def names(self) -> frozenset[str]:
        """Empty: nothing is stored, and there is nothing that is not there."""
        return frozenset()

    def get(self, name: str, shape: tuple[int, ...] | None = None, part: Cut | None = None) -> torch.Tensor:
        """A part is that of the whole tensor, which exists for a moment: so the numbers do not depend on the ranks."""
        if shape is None:
            raise ValueError(f"random weights need a shape for {name!r}")
        if part is not None:
            return self.get(name, shape).narrow(part.dim, part.start, part.length).clone()
        if len(shape) < 2:
            return torch.full(
                shape,
                1.0 if "norm" in name.lower() and not name.endswith("bias") else 0.0,
                dtype=self._dtype,
                device=self._device,
            )
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode(), self._seed & 0xFFFFFFFF))
        return torch.empty(shape, dtype=self._dtype, device=self._device).normal_(0.0, _RANDOM_STD, generator=generator)


def open_weights(checkpoint: Checkpoint, load_format: str, seed: int, device: torch.device | None = None) -> Weights:
    """The weights of a checkpoint.

    Args:
        load_format: `auto`, `safetensors` or `gguf` (what the checkpoint must be), or `dummy` for random ones.
        seed: of random weights.
        device: where random weights are drawn.

    Raises:
        StartupError: there are none of that format, or they cannot be read.
    """
    if load_format == "dummy":
        return DummyWeights(_config_dtype(checkpoint.config), seed, device)
    if load_format != "auto" and checkpoint.format not in (load_format, "none"):
        raise StartupError(f"--load-format is {load_format}, and {checkpoint.name} is {checkpoint.format}")
    quantized = checkpoint.config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise StartupError(
            f"{checkpoint.name} is quantised ({method or 'unknown method'}), which cannot be loaded from safetensors; "
            "use the original in bfloat16 or float16, or a GGUF file"
        )
    if not checkpoint.weight_files:
        pickles = pickled_weights(checkpoint.directory)
        if pickles:
            raise StartupError(
                f"{checkpoint.directory} holds its weights only as {pickles[0]}, a pickle, which could run code when "
                "opened, so it is not; convert it to safetensors (transformers: load it, then save_pretrained)"
            )
        raise StartupError(
            f"{checkpoint.directory} holds no weights (*.safetensors); --load-format dummy makes random ones"
        )
    return SafetensorsWeights(checkpoint.weight_files, checkpoint.weight_index)


def _read(reader: Any, stored: str, part: Cut) -> torch.Tensor:
    """A part of a stored tensor. Rows stay where the file is mapped, as whole tensors do; columns are copied out."""
    where = (*[slice(None)] * part.dim, slice(part.start, part.start + part.length))
    tensor: torch.Tensor = reader.get_slice(stored)[where]
    return tensor.contiguous()


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise StartupError(f"{file} is not a safetensors file, or a damaged one: {error}") from None


def _text_name(stored: str) -> str:
    for prefix, plain in _TEXT_PREFIXES.items():
        if stored.startswith(prefix):
            return plain + stored.removeprefix(prefix)
    return stored


def _config_dtype(config: Mapping[str, Any]) -> torch.dtype:
    named = config.get("torch_dtype")
    dtype = getattr(torch, named, None) if isinstance(named, str) else None
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.bfloat16
