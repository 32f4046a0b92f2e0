"""Whatever a client sends, it gets an answer or a clean refusal, and the server goes on."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixlm.api.protocols import (
    anthropic,
    chat_prompt,
    embeddings,
    native,
    ollama,
    ollama_embed,
    openai,
    openai_chat,
    openai_completions,
    parsing,
    rerank,
    responses,
    tokens,
)
from radixlm.api.protocols import sessions as session_fields
from radixlm.api.protocols.sampling import SamplingFields, TextFields
from support.server import Answer, Api, parse_named, tokenizer

SAMPLING = [*SamplingFields.__struct_fields__, *TextFields.__struct_fields__]
OPENAI = [*openai.SAMPLING.names, *openai.TEXT.names, *openai.COMMON.names, *openai.UNSERVED]
FIELDS = {
    "/v1/chat/completions": [*OPENAI, *chat_prompt.FIELDS.names, *openai_chat.FIELDS.names, *openai_chat.REFUSED],
    "/v1/completions": [*OPENAI, *openai_completions.FIELDS.names, *openai_completions.REFUSED, "prompt"],
    "/generate": [*native.FIELDS.names, *native.REFUSED, "text", "input_ids"],
    "/tokenize": [*tokens.TOKENIZE.names, *chat_prompt.FIELDS.names, "prompt"],
    "/detokenize": [*tokens.DETOKENIZE.names],
    "/parse_function_call": [*parsing.CALLS.names],
    "/separate_reasoning": [*parsing.REASONING.names],
    "/abort_request": ["rid", "abort_all"],
    "/v1/messages": [
        *anthropic.FIELDS.names, *anthropic.SAMPLING.names, *anthropic.TEXT.names, *anthropic.REFUSED,
    ],
    "/v1/messages/count_tokens": [*anthropic.FIELDS.names],
    "/v1/responses": [
        *responses.FIELDS.names, *responses.SAMPLING.names, *responses.TEXT.names, *responses.REFUSED,
    ],
    "/v1/responses/input_tokens": [*responses.FIELDS.names],
    "/api/chat": [*ollama.FIELDS.names, *ollama.REFUSED],
    "/api/generate": [*ollama.FIELDS.names, *ollama.REFUSED],
    "/api/embed": [*ollama_embed.FIELDS.names],
    "/v1/embeddings": [*embeddings.FIELDS.names, *embeddings.REFUSED, "input"],
    "/open_session": [*session_fields.OPEN.names, "streaming"],
    "/close_session": [*session_fields.CLOSE.names],
    "/encode": [*embeddings.FIELDS.names, "text", "input_ids"],
    "/v1/rerank": [*rerank.FIELDS.names, *rerank.REFUSED],
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/completions": {"model": "tiny", "prompt": "Hi", "max_tokens": 3},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 3}},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
    "/parse_function_call": {"text": '<tool_call>{"name": "f"}</tool_call>'},
    "/separate_reasoning": {"text": "<think>a</think>b", "reasoning_parser": "think"},
    "/abort_request": {"rid": "x"},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"model": "tiny", "input": "Hi", "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"model": "tiny", "input": "Hi"},
    "/api/chat": {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 3}},
    "/api/generate": {"model": "tiny", "prompt": "Hi", "options": {"num_predict": 3}},
    "/api/embed": {"model": "tiny", "input": "Hi"},
    "/v1/embeddings": {"model": "tiny", "input": "Hi"},
    "/open_session": {},
    "/close_session": {"session_id": "x"},
    "/encode": {"text": "Hi"},
    "/v1/rerank": {"query": "Hi", "documents": ["a", "b"]},
}

#: Where the words of a chat are, and what they are made of.
SPOKEN = {"messages", "input", "tools", "options", "system"}

numbers = st.one_of(
    st.integers(-5, 5),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**30, tokenizer().vocab_size, 128, 129]),
    st.floats(allow_nan=False, allow_infinity=False),
)
words = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", "tiny", "auto", "none", "user", "text", "1", "9" * 30, "9" * 5000, "<|im_end|>", "(a+)+b", "["]
    ),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, words)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=6,
)
kinds = st.sampled_from(
    [
        "text", "image", "tool_use", "tool_result", "thinking", "message", "function_call", "function_call_output",
        "reasoning", "input_text", "output_text", "function", "custom",
    ]
)  # fmt: skip
PART_FIELDS = (
    "text", "content", "id", "name", "input", "tool_use_id", "thinking", "call_id", "arguments", "output",
    "input_schema", "function", "summary", "role",
)  # fmt: skip
parts = st.fixed_dictionaries({"type": kinds}, optional=dict.fromkeys(PART_FIELDS, values))
messages = st.lists(
    st.one_of(
        parts,
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer", ""])},
            optional={
                "content": st.one_of(values, st.lists(parts, max_size=3)),
                "tool_calls": values, "name": values, "tool_call_id": values, "thinking": values, "images": values,
            },
        ),
    ),
    max_size=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with Api({"limits": {"max_choices": 4, "max_batch_items": 8}}) as api:
        yield api


def check(api: Api, answer: Answer, sent: Any) -> None:
    assert answer.status in (200, 400, 404), (answer.status, answer.body, sent)
    if answer.status != 200:
        assert answer.error["type"] in ("invalid_request_error", "not_found_error", None)
        assert len(answer.body) < 2048
    elif answer.body.startswith(b"event: "):
        last = parse_named(answer.body)[-1]["type"]
        assert last in ("message_stop", "response.completed", "response.incomplete")
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.events[-1] == "[DONE]"
    elif answer.headers["content-type"] == "application/x-ndjson":
        assert json.loads(answer.body.splitlines()[-1])["done"] is True
    else:
        assert answer.json is not None
    assert api.hub.in_flight == 0 and not api.engine.running


def throw(api: Api, path: str, count: int) -> None:
    """So many bodies with any value in any field."""
    fields = st.dictionaries(st.sampled_from(FIELDS[path]), values, max_size=4)

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(fields, messages, st.booleans())
    def run(fields: dict[str, Any], spoken: list[Any], stream: bool) -> None:
        body = {**BASES[path], "stream": stream, **fields}
        for name in SPOKEN & fields.keys():
            if name != "options":
                body[name] = spoken
        check(api, api.post(path, body), body)

    run()


@pytest.mark.parametrize("path", list(FIELDS))
def test_any_value_in_any_field(api: Api, path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        throw(api, path, 60)
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", list(FIELDS))
def test_ten_thousand_bodies(api: Api, path: str) -> None:
    throw(api, path, 10_000)


def test_any_sampling_parameter_in_generate(api: Api) -> None:
    names = st.one_of(st.sampled_from([*SAMPLING, *native.REFUSED_SAMPLING, "no_stop_trim", "sampling_seed"]), words)

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.dictionaries(names, values, max_size=4), st.booleans(), st.booleans())
    def run(params: dict[str, Any], many: bool, stream: bool) -> None:
        params = {"max_new_tokens": 3, **params}
        body = {
            "text": ["a", "b"] if many else "a",
            "sampling_params": params,
            "stream": stream,
            "return_logprob": many,
        }
        check(api, api.post("/generate", body), body)

    run()


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.one_of(st.binary(max_size=60), values.map(lambda value: json.dumps(value).encode())))
def test_any_body(api: Api, data: bytes) -> None:
    for path in BASES:
        check(api, api.post(path, raw=data, headers={"content-type": "application/json"}), data)


def test_numbers_of_absurd_length(api: Api) -> None:
    """Python refuses to print or read whole numbers of more than 4300 digits."""
    huge = b"9" * 5000
    for field in (
        b"max_tokens",
        b"n",
        b"seed",
        b"top_k",
        b"priority",
        b"logprobs",
        b"stream_interval",
        b"prompt",
        b"stop",
    ):
        for value in (huge, b"-" + huge, b"[" + huge + b"]", b'{"' + huge + b'": 1}'):
            raw = b'{"model": "tiny", "prompt": "a", "' + field + b'": ' + value + b"}"
            check(api, api.post("/v1/completions", raw=raw, headers={"content-type": "application/json"}), raw[:80])
    for path in ("/generate", "/detokenize"):
        raw = b'{"input_ids": [' + huge + b'], "tokens": [' + huge + b"]}"
        check(api, api.post(path, raw=raw, headers={"content-type": "application/json"}), raw[:80])
