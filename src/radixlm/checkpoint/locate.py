"""This module owns the answer to "which model is meant": a name on the command line becomes a `Checkpoint`."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from radixlm.base.errors import StartupError
from radixlm.checkpoint.cache import Cache, default_root
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.checkpoint.convert import CONVERTER_VERSION, convert
from radixlm.checkpoint.directory import read_directory, read_tokenizer_config
from radixlm.checkpoint.hub import HUB_ID, snapshot
from radixlm.checkpoint.packaged import DIRECTORIES, PACKAGED, Packaged, Report, gguf_file, model_directory


def locate(
    model: str,
    revision: str | None,
    tokenizer_path: str | None,
    report: Report,
    cache: Cache | None = None,
) -> Checkpoint:
    """Find a model, fetching and converting it first where that is needed.

    Args:
        model: short name of a packaged model, directory, GGUF file, or hub id. A packaged name goes before a
            directory of the same name; `./name` means the directory.
        revision: branch, tag or commit of a hub model.
        tokenizer_path: directory or tokenizer.json to take the tokenizer and chat template from instead.
        report: hears (what is being done, fraction done) during work that takes time.
        cache: where fetched and converted models are kept; by default where the environment says.

    Raises:
        StartupError: there is no such model, or it cannot be read. The message says what to do.
    """
    checkpoint = _find(model, revision, tokenizer_path is None, report, cache)
    return checkpoint if tokenizer_path is None else _with_tokenizer(checkpoint, Path(tokenizer_path).expanduser())


def _find(model: str, revision: str | None, tokenizer: bool, report: Report, cache: Cache | None) -> Checkpoint:
    path = Path(model).expanduser()
    known = (*PACKAGED, *DIRECTORIES)
    is_hub_id = model not in known and not path.exists() and HUB_ID.fullmatch(model) is not None
    if revision is not None and not is_hub_id:
        raise StartupError(f"--revision {revision} names a version of a hub model, and {model} is not one")
    if model in PACKAGED:
        return _packaged(PACKAGED[model], tokenizer, report, cache or Cache(default_root()))
    if model in DIRECTORIES:
        return read_directory(model_directory(DIRECTORIES[model], cache or Cache(default_root()), report), model)
    if path.is_dir():
        return _directory(path, tokenizer, report, cache)
    if path.is_file():
        return _gguf(path, path.stem, tokenizer, report, cache or Cache(default_root()))
    if is_hub_id:
        report(f"fetching {model}", 0.0)
        return read_directory(snapshot(model, revision), model)
    if os.sep in model or model.endswith(".gguf"):
        raise StartupError(f"there is no file or directory {model}")
    near = difflib.get_close_matches(model, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise StartupError(
        f"there is no model {model!r}: {hint}give a directory, a .gguf file, a hub id (organisation/name), "
        f"or one of the packaged models {', '.join(known)}"
    )


def _directory(path: Path, tokenizer: bool, report: Report, cache: Cache | None) -> Checkpoint:
    name = path.resolve().name
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        first = [file for file in files if not re.search(r"-\d{5}-of-\d{5}$", file.stem) or "-00001-of-" in file.name]
        if len(first) == 1:
            return _gguf(first[0], first[0].stem, tokenizer, report, cache or Cache(default_root()))
        if first:
            raise StartupError(f"{path} holds several GGUF files; name one of {', '.join(file.name for file in first)}")
    return read_directory(path, name)


def _packaged(model: Packaged, tokenizer: bool, report: Report, cache: Cache) -> Checkpoint:
    def fill(target: Path) -> None:
        source = gguf_file(model, cache, report)
        convert(source, target, tokenizer=tokenizer, report=lambda done: report(f"converting {model.name}", done))

    return _converted(model.name, model.sha256, fill, tokenizer, report, cache)


def _gguf(path: Path, name: str, tokenizer: bool, report: Report, cache: Cache) -> Checkpoint:
    facts = path.stat()
    key = f"{path.resolve()}\n{facts.st_size}\n{facts.st_mtime_ns}"

    def fill(target: Path) -> None:
        convert(path, target, tokenizer=tokenizer, report=lambda done: report(f"converting {path.name}", done))

    return _converted(name, hashlib.sha256(key.encode()).hexdigest(), fill, tokenizer, report, cache)


def _converted(
    name: str, key: str, fill: Callable[[Path], None], tokenizer: bool, report: Report, cache: Cache
) -> Checkpoint:
    """The converted model, from the cache if it was converted before: then no byte of the GGUF file is read."""
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", name)[:80]
    bare = "" if tokenizer else "-bare"
    directory = cache.directory(
        f"gguf-{slug}-{key[:16]}-v{CONVERTER_VERSION}{bare}",
        fill,
        lambda: report(f"another process converts {name}; waiting for it", 0.0),
    )
    return read_directory(directory, name, "gguf")


def _with_tokenizer(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise StartupError(
            f"there is no tokenizer {file}; --tokenizer-path names a directory with tokenizer.json, or that file"
        )
    return dataclasses.replace(checkpoint, tokenizer_file=file, tokenizer_config=read_tokenizer_config(file.parent))
