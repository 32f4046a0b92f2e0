"""Layers of values, contradictions, what follows from the device, and the flat form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from radixlm.base.errors import StartupError
from radixlm.config import resolve
from radixlm.config.options import OPTIONS
from radixlm.config.resolve import Given
from radixlm.config.schema import Config


def layer(origin: str, **values: Any) -> dict[str, Given]:
    return {name: Given(value, origin, name) for name, value in values.items()}


#: Options with an independent range each, so that any mixture of values is consistent.
_FREE = st.fixed_dictionaries(
    {},
    optional={
        "port": st.integers(0, 65535),
        "page_size": st.integers(1, 64),
        "schedule_policy": st.sampled_from(("fcfs", "lpm", "lof")),
        "shutdown_timeout": st.floats(0, 100),
        "disable_radix_cache": st.booleans(),
        "served_model_name": st.none() | st.sampled_from(("a", "b")),
        "log_level": st.sampled_from(("debug", "info")),
    },
)


@given(_FREE, _FREE, _FREE)
def test_the_strongest_layer_that_says_something_wins(
    flags: dict[str, Any], env: dict[str, Any], file: dict[str, Any]
) -> None:
    resolved = resolve.resolve((layer("flag", **flags), layer("env", **env), layer("file", **file)))
    values = resolve.to_flat(resolved.config)
    for option in OPTIONS:
        said = [(name, said) for name, said in (("flag", flags), ("env", env), ("file", file)) if option.name in said]
        origin, value = (said[0][0], said[0][1][option.name]) if said else ("default", option.default)
        assert values[option.name] == value
        assert resolved.origins[option.name] == origin


@given(_FREE)
def test_flat_form_round_trips_through_json(values: dict[str, Any]) -> None:
    config = resolve.override(Config(), values)
    assert resolve.from_flat(json.loads(json.dumps(resolve.to_flat(config)))) == config


def test_nothing_said_is_the_default_configuration() -> None:
    assert resolve.resolve(()).config == Config()
    assert resolve.from_flat(resolve.defaults()) == Config()


def test_the_flat_form_is_strict() -> None:
    flat = resolve.to_flat(Config())
    with pytest.raises(StartupError, match="prot is not a known option; did you mean port"):
        resolve.from_flat(flat | {"prot": 1})
    with pytest.raises(StartupError, match="lacks port"):
        resolve.from_flat({name: value for name, value in flat.items() if name != "port"})
    with pytest.raises(StartupError, match="canonical"):
        resolve.from_flat(flat | {"block_size": 16})
    with pytest.raises(StartupError, match="whole number"):
        resolve.from_flat(flat | {"port": "30000"})


def test_override_takes_any_name_and_refuses_unknown_ones() -> None:
    config = resolve.override(Config(), {"block_size": 16, "enable_prefix_caching": False, "dtype": "bf16"})
    assert config.cache.page_size == 16
    assert config.cache.disable_radix_cache
    assert config.model.dtype == "bfloat16"
    with pytest.raises(StartupError, match="page_sise is not a known option; did you mean page-size"):
        resolve.override(Config(), {"page_sise": 16})
    with pytest.raises(StartupError, match="page_size is given twice"):
        resolve.override(Config(), {"page_size": 16, "block_size": 16})


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"max_prefill_tokens": 256, "chunked_prefill_size": 512}, "max-prefill-tokens .256. is smaller than chunked"),
        ({"max_total_tokens": 8, "page_size": 16}, "smaller than one page"),
        ({"root_path": "llm"}, "root-path is 'llm'"),
        ({"root_path": "/llm/"}, "root-path is '/llm/'"),
        ({"api_key": "two words"}, "api-key may hold printable ASCII"),
        ({"admin_api_key": "schlüssel"}, "admin-api-key may hold printable ASCII"),
        ({"allowed_origins": "https://ok.example, ok.example"}, "allowed-origins holds 'ok.example'"),
        ({"allowed_origins": "https://ok.example/path"}, "without a path"),
        ({"host": " "}, "host is empty"),
        ({"model": ""}, "model is empty"),
    ],
)
def test_contradictions_and_nonsense_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(StartupError, match=complaint) as caught:
        resolve.override(Config(), values)
    assert "\n" not in caught.value.message


def test_sensible_edges_are_accepted() -> None:
    values = {
        "max_prefill_tokens": 512,
        "chunked_prefill_size": 512,
        "max_total_tokens": 16,
        "page_size": 16,
        "root_path": "/llm",
        "allowed_origins": "*, https://a.example:8443",
        "api_key": "sk-!~",
    }
    resolve.override(Config(), values)


@pytest.mark.parametrize(("kind", "chunk"), [("cpu", 512), ("cuda", 8192), ("null", 8192)])
def test_derive_by_device(kind: str, chunk: int) -> None:
    config, reasons = resolve.derive(Config(), kind)
    assert config.device.device == kind
    assert config.cache.page_size == 1
    assert config.schedule.chunked_prefill_size == chunk
    assert config.schedule.max_prefill_tokens == chunk
    assert set(reasons) == {"device", "page_size", "chunked_prefill_size", "max_prefill_tokens"}
    assert all(reason for _, reason in reasons.values())


def test_derive_keeps_what_was_said() -> None:
    said = {
        "device": "cpu",
        "page_size": 32,
        "chunked_prefill_size": 16,
        "max_prefill_tokens": 64,
    }
    config = resolve.override(Config(), said)
    assert resolve.derive(config, "cpu") == (config, {})


def test_a_small_budget_cuts_the_derived_chunk() -> None:
    config, reasons = resolve.derive(resolve.override(Config(), {"max_prefill_tokens": 100}), "cpu")
    assert config.schedule.chunked_prefill_size == 100
    assert reasons["chunked_prefill_size"] == ("100", "cut to max-prefill-tokens")


def test_the_budget_follows_the_chunk() -> None:
    config, reasons = resolve.derive(resolve.override(Config(), {"chunked_prefill_size": 16}), "cpu")
    assert config.schedule.max_prefill_tokens == 16
    assert reasons["max_prefill_tokens"] == ("16", "one chunk")


def test_the_admin_key_defaults_to_the_key_and_neither_is_told() -> None:
    config, reasons = resolve.derive(resolve.override(Config(), {"api_key": "hunter2"}), "cpu")
    assert config.server.admin_api_key == "hunter2"
    assert "hunter2" not in str(reasons)


@given(
    _FREE,
    st.sampled_from(("cpu", "cuda", "null")),
    st.integers(1, 10_000) | st.none(),
    st.integers(1, 10_000) | st.none(),
)
def test_derive_is_idempotent_and_never_contradicts(
    values: dict[str, Any], kind: str, chunk: int | None, budget: int | None
) -> None:
    try:
        config = resolve.override(Config(), values | {"chunked_prefill_size": chunk, "max_prefill_tokens": budget})
    except StartupError:
        assume(False)
    once, _ = resolve.derive(config, kind)
    assert resolve.derive(once, kind) == (once, {})
    assert resolve.to_flat(once).items() >= values.items()
