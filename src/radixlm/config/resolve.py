"""This module owns resolution: layers of values -> one frozen `Config`, checked, with the origin of each value. Pure.

`resolve` knows what people said. `derive` fills what they left open from the kind of device; what needs the
loaded model or the free memory is decided at boot and told in `EngineFacts.decisions`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from radixlm.base.errors import StartupError
from radixlm.config.options import BY_NAME, OPTIONS, OWNERS, Value, find
from radixlm.config.schema import Config

#: Prompt tokens of one request in one step. On a CPU a step is compute-bound from a few hundred tokens on, so a larger
#: chunk only makes running streams wait; a GPU needs thousands to be busy.
CHUNK: Final = {"cpu": 512, "cuda": 8192, "null": 8192}

_ORIGIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s,]+")


@dataclass(frozen=True, slots=True)
class Given:
    """A checked value and where it was given.

    Attributes:
        origin: for the reader, e.g. `flag --port`, `env RADIXLM_PORT`, `file radixlm.yaml`.
        key: the spelling it was given under.
    """

    value: Value
    origin: str
    key: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration and the origin of each of its values, by option name; `default` where nobody said anything."""

    config: Config
    origins: Mapping[str, str]


def resolve(layers: Iterable[Mapping[str, Given]]) -> Resolved:
    """Merge layers of values, the strongest first (flags, environment, file).

    Raises:
        StartupError: values that contradict each other.
    """
    merged: dict[str, Given] = {}
    for layer in layers:
        for name, given in layer.items():
            merged.setdefault(name, given)
    config = from_flat(defaults() | {name: given.value for name, given in merged.items()})
    origins = {option.name: merged[option.name].origin if option.name in merged else "default" for option in OPTIONS}
    return Resolved(config, origins)


def override(config: Config, values: Mapping[str, Any]) -> Config:
    """A configuration with some values replaced; any name of an option will do (Python keyword arguments).

    Raises:
        StartupError: an unknown name (the nearest is named), a wrong value, or values that contradict each other.
    """
    changes: dict[str, Value] = {}
    for name, value in values.items():
        option, off = find(name, name)
        if option.name in changes:
            raise StartupError(f"{option.name} is given twice, once as {name}", param=name)
        checked = option.check(value, name)
        changes[option.name] = not checked if off else checked
    return from_flat(to_flat(config) | changes)


def defaults() -> dict[str, Value]:
    return {option.name: option.default for option in OPTIONS}


def to_flat(config: Config) -> dict[str, Value]:
    """Option name -> plain value, of every option: what a child process is given as JSON."""
    return {option.name: getattr(getattr(config, option.owner), option.name) for option in OPTIONS}


def from_flat(values: Mapping[str, Any]) -> Config:
    """The inverse of `to_flat`: every option exactly once, each checked.

    Raises:
        StartupError: a name is unknown or missing, a value is wrong, or values contradict each other.
    """
    if unknown := values.keys() - BY_NAME.keys():
        find(min(unknown), min(unknown))
        raise StartupError(f"{min(unknown)} is not the canonical name of an option")
    if missing := BY_NAME.keys() - values.keys():
        raise StartupError(f"the configuration lacks {', '.join(sorted(missing))}")
    branches: dict[str, dict[str, Value]] = {owner: {} for owner in OWNERS}
    for option in OPTIONS:
        branches[option.owner][option.name] = option.check(values[option.name], option.key)
    config = Config(**{owner: OWNERS[owner](**branch) for owner, branch in branches.items()})
    check(config)
    return config


def check(config: Config) -> None:
    """Refuse values that make no sense together or in a place that only words can describe.

    Raises:
        StartupError: naming both sides and what to do.
    """
    schedule, cache, server = config.schedule, config.cache, config.server
    chunk, budget = schedule.chunked_prefill_size, schedule.max_prefill_tokens
    if chunk is not None and budget is not None and budget < chunk:
        raise StartupError(
            f"max-prefill-tokens ({budget}) is smaller than chunked-prefill-size ({chunk}), so no chunk would fit "
            f"into a step: raise the first or lower the second",
            param="max_prefill_tokens",
        )
    if cache.page_size is not None and cache.max_total_tokens is not None and cache.max_total_tokens < cache.page_size:
        raise StartupError(
            f"max-total-tokens ({cache.max_total_tokens}) is smaller than one page (page-size {cache.page_size})",
            param="max_total_tokens",
        )
    if config.device.device == "null" and config.device.tensor_parallel_size > 1:
        raise StartupError(
            "the null device computes nothing that could be cut into parts: use tensor-parallel-size 1",
            param="tensor_parallel_size",
        )
    if not config.model.model:
        raise StartupError("model is empty; name a directory, a GGUF file, a hub id or a packaged model", param="model")
    if not server.host.strip():
        raise StartupError("host is empty; use 127.0.0.1 for this machine or 0.0.0.0 for all interfaces", param="host")
    if server.root_path and (not server.root_path.startswith("/") or server.root_path.endswith("/")):
        raise StartupError(
            f"root-path is {server.root_path!r}; it starts with / and does not end with one, like /llm",
            param="root_path",
        )
    for name, key in (("api-key", server.api_key), ("admin-api-key", server.admin_api_key)):
        if key is not None and not re.fullmatch(r"[!-~]+", key):
            raise StartupError(
                f"{name} may hold printable ASCII without spaces only: it travels in a header", param=name
            )
    for origin in filter(None, (part.strip() for part in server.allowed_origins.split(","))):
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise StartupError(
                f"allowed-origins holds {origin!r}; an origin looks like https://example.org:8443, without a path",
                param="allowed_origins",
            )


def derive(config: Config, kind: str) -> tuple[Config, dict[str, tuple[str, str]]]:
    """Fill what was left open and follows from the kind of device alone.

    Args:
        kind: cpu, cuda or null.

    Returns:
        The configuration, and option name -> (value, reason) of each value that was filled.
    """
    schedule = config.schedule
    filled: dict[str, Value] = {}
    reasons: dict[str, tuple[str, str]] = {}

    def fill(name: str, value: Value, reason: str) -> None:
        filled[name] = value
        reasons[name] = (BY_NAME[name].show(value), reason)

    if config.device.device == "auto":
        fill("device", kind, "found on this machine")
    if config.cache.page_size is None:
        fill("page_size", 1, "prefixes can be shared up to any token")
    chunk = schedule.chunked_prefill_size
    if chunk is None:
        chunk = CHUNK[kind]
        reason = f"keeps a {kind} device busy, and running streams wait for one such chunk at most"
        if schedule.max_prefill_tokens is not None and schedule.max_prefill_tokens < chunk:
            chunk, reason = schedule.max_prefill_tokens, "cut to max-prefill-tokens"
        fill("chunked_prefill_size", chunk, reason)
    if schedule.max_prefill_tokens is None:
        fill("max_prefill_tokens", chunk, "one chunk")
    if config.server.admin_api_key is None and config.server.api_key is not None:
        fill("admin_api_key", config.server.api_key, "same as api-key")
    return from_flat(to_flat(config) | filled), reasons
