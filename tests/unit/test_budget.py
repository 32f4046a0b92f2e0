"""The size of the KV pool: hand computations, limits that nothing may break, and errors that say what would do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixlm.base.errors import StartupError
from radixlm.memory.budget import MAX_RUNNING, Budget, Demand, budget

GB = 10**9


def size(**changes: Any) -> Budget:
    values: dict[str, Any] = {
        "memory_total": 24 * GB,
        "memory_free": 20 * GB,
        "weight_bytes": GB,
        "bytes_per_token": 20_000,
        "page_size": 1,
        "context_length": 8192,
        "context_asked": False,
        "share": 0.5,
    }
    return budget(Demand(**{**values, **changes}))


def test_half_of_what_is_free_by_default() -> None:
    found = size()
    assert found.tokens == 500_000  # 10 GB / 20 kB
    assert found.bytes == 10 * GB
    assert found.max_running == MAX_RUNNING
    assert found.context_length == 8192
    assert (
        found.reason
        == "10.0 GB for 500,000 tokens of 20,000 bytes: 50% of the 20.0 GB that are free beside the weights"
    )


def test_no_more_than_can_ever_be_needed() -> None:
    found = size(max_running=4, page_size=16, context_length=1000)
    assert found.pages == 4 * 63
    assert "all that 4 sequences of 1,000 tokens can need" in found.reason


def test_a_fraction_counts_weights_and_pool_together() -> None:
    found = size(mem_fraction_static=0.5)
    assert found.tokens == (12 * GB - GB) // 20_000
    assert "0.5 of 24.0 GB less 1.0 GB of weights" in found.reason
    assert size(mem_fraction_static=0.99).tokens == 20 * GB // 20_000  # what is not there cannot be had


def test_an_asked_size_is_exact_or_an_error() -> None:
    assert size(max_total_tokens=1000, page_size=16).pages == 62
    with pytest.raises(StartupError) as error:
        size(max_total_tokens=600_000)
    assert error.value.message == (
        "a KV pool of 600,000 tokens takes 12.0 GB, more than 50% of the 20.0 GB that are free beside the weights: "
        "use --max-total-tokens 500000 or less"
    )


def test_a_small_pool_shortens_the_context_unless_it_was_asked_for() -> None:
    found = size(memory_free=480_000_000, context_length=131_072)
    assert found.tokens == found.context_length == 12_000
    assert found.reason.endswith("sequences are limited to 12,000 of the model's 131,072 tokens")
    with pytest.raises(StartupError) as error:
        size(memory_free=480_000_000, context_length=131_072, context_asked=True)
    assert error.value.message == (
        "KV pool of 0.2 GB holds 12,000 tokens, less than --context-length 131072: use <= 12000"
    )


def test_the_fraction_that_an_error_names_works() -> None:
    ask = {"context_length": 700_000, "context_asked": True}
    with pytest.raises(StartupError, match=r"use <= 500000 or --mem-fraction-static 0\.63$"):
        size(**ask)
    assert size(**ask, mem_fraction_static=0.63).context_length == 700_000
    with pytest.raises(StartupError, match=r"--max-total-tokens 8192$"):
        size(max_total_tokens=100, context_asked=True)


def test_no_room_for_a_page() -> None:
    with pytest.raises(StartupError, match=r"no memory for a KV pool: a page of 64 tokens takes 1\.3 MB, beyond"):
        size(memory_free=1_000_000, page_size=64)
    with pytest.raises(StartupError, match="higher --max-total-tokens"):
        size(max_total_tokens=10, page_size=64)


@settings(max_examples=300, deadline=None)
@given(
    free=st.integers(0, 10**12),
    weights=st.integers(0, 10**11),
    per_token=st.integers(64, 10**6),
    page_size=st.sampled_from([1, 16, 32, 64]),
    context=st.integers(1, 10**6),
    asked=st.booleans(),
    fraction=st.none() | st.floats(0.01, 1.0),
    total=st.none() | st.integers(1, 10**8),
    rows=st.none() | st.integers(1, 10_000),
)
def test_limits_that_nothing_breaks(
    free: int,
    weights: int,
    per_token: int,
    page_size: int,
    context: int,
    asked: bool,
    fraction: float | None,
    total: int | None,
    rows: int | None,
) -> None:
    try:
        found = size(
            memory_total=free + weights, memory_free=free, weight_bytes=weights, bytes_per_token=per_token,
            page_size=page_size, context_length=context, context_asked=asked, mem_fraction_static=fraction,
            max_total_tokens=total, max_running=rows,
        )  # fmt: skip
    except StartupError:
        return
    assert found.pages >= 1
    assert found.bytes == found.pages * page_size * per_token <= free
    assert 1 <= found.context_length <= min(context, found.tokens)
    assert found.context_length == context or not asked
    assert 1 <= found.max_running == (rows or min(found.max_running, MAX_RUNNING))
    if fraction is None:
        assert found.bytes <= free / 2
    if total is not None:
        assert found.tokens <= total
