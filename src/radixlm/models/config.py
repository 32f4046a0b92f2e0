"""This module owns reading a model's `config.json`: required fields, documented defaults, the many spellings of rope.

A default is the one that `transformers` documents for the family; a field without one is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixlm.base.errors import StartupError
from radixlm.ops.rope import KINDS, RopeParameters

_REQUIRED = object()


class Fields:
    """Typed access to a mapping. A field that is null counts as left out."""

    def __init__(self, values: Mapping[str, Any], path: str = "config.json") -> None:
        self._values = values
        self._path = path

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, default: Any = _REQUIRED) -> int:
        """A whole number of at least 1."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 1:
            raise StartupError(f"{self._path}: {name} is {value!r}; it must be a whole number of at least 1")
        return int(value)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise StartupError(f"{self._path}: {name} is {value!r}; it must be a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise StartupError(f"{self._path}: {name} is {value!r}; it must be true or false")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise StartupError(f"{self._path}: {name} is {value!r}; it must be a string")
        return value

    def strings(self, name: str) -> list[str] | None:
        """A list of strings, or None if left out."""
        value = self._get(name, None)
        if value is not None and not (isinstance(value, list | tuple) and all(isinstance(x, str) for x in value)):
            raise StartupError(f"{self._path}: {name} is {value!r}; it must be a list of strings")
        return None if value is None else list(value)

    def integers(self, name: str) -> list[int] | None:
        """A list of whole numbers, or None if left out."""
        value = self._get(name, None)
        if value is not None and not (isinstance(value, list | tuple) and all(type(x) is int for x in value)):
            raise StartupError(f"{self._path}: {name} is {value!r}; it must be a list of whole numbers")
        return None if value is None else list(value)

    def section(self, name: str) -> Fields | None:
        """A nested mapping, or None if left out or empty."""
        value = self._get(name, None)
        if value is not None and not isinstance(value, Mapping):
            raise StartupError(f"{self._path}: {name} is {value!r}; it must be a mapping")
        return Fields(value, f"{self._path}: {name}") if value else None

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise StartupError(f"{self._path} has no {name!r}, and there is no default for it")
        return default


@dataclass(frozen=True, slots=True)
class Sizes:
    """What every decoder config says, checked."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


def sizes(fields: Fields, head_dim: int = 0) -> Sizes:
    """
    Defaults: `num_key_value_heads` is `num_attention_heads`, `rms_norm_eps` 1e-6, `head_dim` as given or, if that is 0,
    `hidden_size / num_attention_heads`.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise StartupError(
            f"config.json: num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        )
    if not head_dim and "head_dim" not in fields and hidden % heads:
        raise StartupError(
            f"config.json has no 'head_dim', and hidden_size ({hidden}) is no multiple of num_attention_heads ({heads})"
        )
    dim = fields.integer("head_dim", head_dim or hidden // heads)
    if dim % 2:
        raise StartupError(f"config.json: head_dim is {dim}; it must be even to be rotated")
    return Sizes(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        eps=fields.number("rms_norm_eps", 1e-6),
    )


def layer_kinds(fields: Fields, layers: int, default: list[str]) -> list[str]:
    """`full_attention` or `sliding_attention` for each layer: `layer_types`, or the family's default."""
    kinds = fields.strings("layer_types") or default
    odd = set(kinds) - {"full_attention", "sliding_attention"}
    if odd or len(kinds) < layers:
        raise StartupError(
            f"config.json: layer_types must name full_attention or sliding_attention for each of the {layers} layers; "
            f"it has {len(kinds)} entries" + (f" and names {', '.join(sorted(odd))}" if odd else "")
        )
    return kinds[:layers]


def rope(
    fields: Fields, dim: int, positions: int, *, theta: float = 10_000.0, kind: str = "full_attention"
) -> RopeParameters:
    """The rotation of layers of that kind.

    Read from `rope_parameters` (flat, or one mapping per kind of layer) or `rope_scaling` beside `rope_theta`; the kind
    of scaling is called `rope_type` or `type`; null means none.

    Args:
        positions: `max_position_embeddings`, the original length where the config gives no other.
        theta: the family's default base.
    """
    found = _rope_section(fields, kind)
    theta = fields.number("rope_theta", theta)
    if found is None:
        return RopeParameters(dim, theta)
    theta = found.number("rope_theta", theta)
    scaling = found.text("rope_type", found.text("type", "default"))
    if scaling not in KINDS:
        raise StartupError(f"config.json: rope scaling {scaling!r} is not known here; known: {', '.join(KINDS)}")
    if found.number("partial_rotary_factor", 1.0) != 1.0:
        raise StartupError("config.json: partial_rotary_factor is not 1; this architecture rotates whole heads")
    if scaling == "default":
        return RopeParameters(dim, theta)
    if scaling in ("linear", "dynamic"):
        return RopeParameters(dim, theta, scaling, found.number("factor"), positions)
    original = fields.integer(
        "original_max_position_embeddings", found.integer("original_max_position_embeddings", positions)
    )
    if scaling == "llama3":
        low, high = found.number("low_freq_factor"), found.number("high_freq_factor")
        return RopeParameters(
            dim, theta, scaling, found.number("factor"), original, low_freq_factor=low, high_freq_factor=high
        )
    return RopeParameters(
        dim,
        theta,
        scaling,
        found.number("factor", positions / original),
        original,
        beta_fast=found.number("beta_fast", 32.0) or 32.0,
        beta_slow=found.number("beta_slow", 1.0) or 1.0,
        attention_factor=found.number("attention_factor", 0.0),
        mscale=found.number("mscale", 0.0),
        mscale_all_dim=found.number("mscale_all_dim", 0.0),
        truncate=found.flag("truncate", True),
    )


def positions(fields: Fields, default: int) -> int:
    """`max_position_embeddings`."""
    return fields.integer("max_position_embeddings", default)


def context_length(fields: Fields, default: int) -> int:
    """Positions the model can be used for.

    Linear and dynamic scaling stretch `max_position_embeddings` by their factor, YaRN its original length; Llama 3
    states the stretched length as `max_position_embeddings` already.
    """
    stated = positions(fields, default)
    parameters = rope(fields, 2, stated)
    if parameters.kind in ("linear", "dynamic", "yarn"):
        return max(stated, int(parameters.original * parameters.factor))
    return stated


def _rope_section(fields: Fields, kind: str) -> Fields | None:
    scaling = fields.section("rope_scaling")
    parameters = fields.section("rope_parameters")
    if parameters is not None and ("full_attention" in parameters or "sliding_attention" in parameters):
        parameters = parameters.section(kind)
        # The older field speaks of the layers that see everything.
        return parameters if kind != "full_attention" or scaling is None else scaling
    return scaling or parameters
