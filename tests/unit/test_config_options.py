"""Options as users see them: names, help, parsing, ranges, and the nearest of an unknown one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixlm.base.errors import StartupError
from radixlm.config.options import BY_NAME, OPTIONS, OWNERS, Option, find, nearest
from radixlm.config.schema import Config


def values(option: Option) -> st.SearchStrategy[object]:
    """Valid values of an option, None left out."""
    if option.kind is bool:
        return st.booleans()
    if option.choices:
        return st.sampled_from(option.choices)
    low, high = option.low, option.high
    if option.kind is int:
        return st.integers(int(low or 0), int(high if high is not None else 2**40))
    if option.kind is float:
        return st.floats(low or 0.0, high if high is not None else 1e6, allow_nan=False)
    return st.just(str(option.default or "text"))


def test_names_are_unique_over_all_owners_and_spellings() -> None:
    spellings = [name for option in OPTIONS for name in (option.key, *option.names, *option.off_keys)]
    assert len(spellings) == len(set(spellings))
    assert len(BY_NAME) == len(OPTIONS) == sum(len(owner.__dataclass_fields__) for owner in OWNERS.values())


def test_every_option_has_one_line_of_help_and_a_default_to_show() -> None:
    for option in OPTIONS:
        assert option.help, option.name
        assert "\n" not in option.help, option.name
        assert not option.help.endswith("."), option.name
        assert option.default_text, option.name
        assert option.default is not None or option.shown, f"{option.name}: what decides its default?"


def test_defaults_are_valid() -> None:
    config = Config()
    for option in OPTIONS:
        default = getattr(getattr(config, option.owner), option.name)
        assert option.check(default, option.key) == default


def test_fewer_than_eighty_options() -> None:
    assert len(OPTIONS) < 75  # the others are --help, --config, --explain and the like


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
@given(data=st.data())
def test_a_valid_value_survives_as_text(option: Option, data: st.DataObject) -> None:
    value = data.draw(values(option))
    assert option.check(value, "here") == value
    assert option.parse(str(value), "here") == value


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("port", "70000", "must be between 0 and 65535"),
        ("port", "-1", "must be between 0 and 65535"),
        ("port", "http", "must be a whole number"),
        ("port", "8.5", "must be a whole number"),
        ("page_size", "0", "must be between 1 and 1024"),
        ("mem_fraction_static", "1.5", "must be between 0.01 and 0.99"),
        ("mem_fraction_static", "nan", "must be finite"),
        ("shutdown_timeout", "inf", "must be finite"),
        ("shutdown_timeout", "soon", "must be a number"),
        ("disable_radix_cache", "maybe", "must be true or false"),
        ("dtype", "int4", "must be one of auto, float32, bfloat16, float16"),
        ("served_model_name", "", "must not be empty"),
        ("served_model_name", "a\nb", "must not hold control characters"),
        ("max_running_requests", "0", "must be at least 1"),
        ("random_seed", str(2**63), "must be between 0 and 9223372036854775807"),
    ],
)
def test_a_wrong_text_is_refused_with_its_place(name: str, text: str, complaint: str) -> None:
    with pytest.raises(StartupError) as caught:
        BY_NAME[name].parse(text, "--the-flag")
    assert caught.value.message.startswith("--the-flag is ")
    assert complaint in caught.value.message
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", "8000"), ("port", 8000.0), ("port", True), ("port", None), ("api_key", 12345), ("log_requests", 1)],
)
def test_a_typed_value_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(StartupError, match="must be"):
        BY_NAME[name].check(value, name)


def test_a_whole_number_serves_as_a_float() -> None:
    value = BY_NAME["shutdown_timeout"].check(30, "here")
    assert value == 30.0
    assert isinstance(value, float)


def test_short_names_of_dtypes() -> None:
    assert BY_NAME["dtype"].parse("bf16", "--dtype") == "bfloat16"
    assert BY_NAME["kv_cache_dtype"].parse("half", "--kv-cache-dtype") == "float16"


def test_a_secret_is_never_shown() -> None:
    option = BY_NAME["api_key"]
    assert option.show("hunter2") == "***"
    with pytest.raises(StartupError) as caught:
        option.check("hunter2\n", "--api-key")
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize("name", ["max-model-len", "max_model_len", "context-length", "context_length", "c"])
def test_synonyms_with_dashes_or_underscores(name: str) -> None:
    assert find(name, name) == (BY_NAME["context_length"], False)


def test_off_names() -> None:
    for name, option in (
        ("enable-radix-cache", "disable_radix_cache"),
        ("enable-prefix-caching", "disable_radix_cache"),
        ("async-scheduling", "disable_overlap_schedule"),
        ("enable-metrics", "disable_metrics"),
        ("no-log-requests", "log_requests"),
        ("disable-priority-scheduling", "enable_priority_scheduling"),
    ):
        assert find(name, name) == (BY_NAME[option], True)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("prot", "port"),
        ("max-num-sequences", "max-num-seqs"),
        ("gpu-mem", "gpu-memory-utilization"),
        ("attn-backend", "attention-backend"),
        ("model_name", "served-model-name"),
        ("chunk", "chunked-prefill-size"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(StartupError, match=f"did you mean {meant}?"):
        find(typed, typed)


def test_nothing_is_suggested_when_nothing_is_near() -> None:
    assert nearest("zzzzzz", ["port", "host"]) is None
    assert nearest("tp", ["-t", "-p"]) is None  # one letter is near to everything


@given(st.text(max_size=20))
def test_any_name_at_all_is_known_or_refused(name: str) -> None:
    try:
        option, _ = find(name, name)
    except StartupError:
        return
    assert option in OPTIONS


@given(st.sampled_from(OPTIONS), st.text(max_size=12))
def test_any_text_at_all_is_a_valid_value_or_refused(option: Option, text: str) -> None:
    try:
        value = option.parse(text, "here")
    except StartupError:
        return
    assert option.check(value, "here") == value
    assert not isinstance(value, float) or math.isfinite(value)
