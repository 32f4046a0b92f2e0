"""One shape of errors on every route, and limits that hold before the work they guard is done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from radixlm.api import errors
from radixlm.base.errors import RadixError
from radixlm.wire.messages import Boot, Fault
from support.server import CONTEXT, Api, tokenizer

VOCAB = tokenizer().vocab_size + 16
PROMPT = {"model": "tiny", "prompt": "Say it:", "max_tokens": 4}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with Api(
        {"limits": {"max_body_bytes": 1 << 20, "max_choices": 5, "max_batch_items": 8, "max_stop_strings": 3}}
    ) as api:
        yield api


def test_unknown_routes_and_wrong_methods(api: Api) -> None:
    answer = api.get("/v1/nope")
    assert answer.status == 404 and answer.error["code"] == "route_not_found"
    answer = api.get("/v1/completions")
    assert answer.status == 405 and answer.error["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"
    assert api.run(api.ask("DELETE", "/generate")).status == 405
    assert api.run(api.ask("PUT", "/generate", {"text": "a"})).status == 200


@pytest.mark.parametrize(
    "raw",
    [b"", b" ", b"{", b"[1]", b'"text"', b"{'a': 1}", b'{"a": NaN}', b'{"a": 1e999}', b"\xff\xfe", b'{"a": "\xff"}',
     b'{"prompt": "\\ud800", "model": "tiny"}', b"[" * 100_000, b'{"a":' * 100_000],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/tokenize", "/abort_request"])
def test_bodies_that_are_no_json_object(api: Api, path: str, raw: bytes) -> None:
    answer = api.post(path, raw=raw, headers={"content-type": "application/json"})
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"


def test_bodies_must_say_that_they_are_json(api: Api) -> None:
    def status(kind: str | None, **more: str) -> int:
        headers = {**({"content-type": kind} if kind is not None else {}), **more}
        answer = api.post("/tokenize", raw=b'{"prompt": "a"}', headers=headers)
        if answer.status != 200:
            assert answer.error["code"] == "unsupported_media_type"
        return answer.status

    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", None):
        assert status(kind) == 200, kind
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert status(kind) == 415, kind
    # a page in a browser may send an untyped body without asking
    assert status(None, origin="http://evil.example") == 415


def test_large_bodies_are_refused_by_what_they_declare_and_by_what_they_are(api: Api) -> None:
    async def declared() -> tuple[int, int]:
        headers = {"content-type": "application/json", "content-length": str(2 << 20)}
        call = api.call("POST", "/v1/completions", raw=b"x" * (2 << 20), headers=headers)
        answer = await call.end()
        return answer.status, call.unread

    async def undeclared() -> tuple[int, int]:
        call = api.call("POST", "/v1/completions", raw=b"x" * (3 << 20), headers={"content-type": "application/json"})
        answer = await call.end()
        assert "max-body-bytes" in answer.error["message"] and answer.error["code"] == "request_too_large"
        return answer.status, call.unread

    status, unread = api.run(declared())
    assert (status, unread) == (413, 32)  # nothing was read at all
    status, unread = api.run(undeclared())
    assert status == 413 and unread == 31  # of 48 pieces of 64 KiB: one more than fits


def test_request_ids_are_echoed_if_they_are_harmless(api: Api) -> None:
    assert api.get("/live", {"x-request-id": "abc-123"}).headers["x-request-id"] == "abc-123"
    made = {api.get("/live", {"x-request-id": bad}).headers["x-request-id"] for bad in ("a b", "x" * 200, "é", "")}
    assert len(made) == 4 and all(len(name) == 32 for name in made)
    assert api.get("/nope", {"x-request-id": "on-errors"}).headers["x-request-id"] == "on-errors"


def test_a_bug_is_a_500_without_its_trace(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("/home/someone/file.py said so")

    monkeypatch.setattr(api.hub, "submit", broken)
    with caplog.at_level(logging.ERROR):
        answer = api.complete()
    assert answer.status == 500 and answer.error["code"] == "internal_error"
    assert "someone" not in answer.body.decode() and "Zero" not in answer.body.decode()
    (record,) = [r for r in caplog.records if r.name.startswith("radixlm")]
    assert answer.headers["x-request-id"] in record.getMessage() and record.exc_info


# ---- stages of the server's life


def test_while_starting_only_live_answers() -> None:
    with Api(ready=False) as api:
        for path in ("/health", "/healthz", "/ready", "/ping", "/v1/models", "/metrics", "/", "/nope"):
            answer = api.get(path)
            assert answer.status == 503 and answer.error["code"] == "starting", path
            assert answer.headers["retry-after"] == "5"
        answer = api.complete()
        assert answer.status == 503 and answer.error["type"] == "service_unavailable_error"
        assert api.get("/live").status == 200
        api.hub.receive([Boot("engine", "loading", 0.25)])
        assert "engine: loading 25%" in api.get("/health").error["message"]
        api.run(api.start())
        for path in ("/health", "/healthz", "/ready", "/ping", "/health_generate"):
            assert api.get(path).json == {"status": "ok"}
        assert api.complete().status == 200


def test_draining_finishes_streams_and_refuses_the_rest() -> None:
    with Api() as api:

        async def go() -> None:
            api.engine.held = True
            call = api.call("POST", "/v1/completions", {**PROMPT, "stream": True})
            await api.until(lambda: bool(api.engine.requests))
            draining = asyncio.create_task(api.hub.drain(5.0))
            await api.settle()
            refused = await api.ask("POST", "/v1/completions", PROMPT)
            assert refused.status == 503 and refused.error["code"] == "shutting_down"
            assert refused.headers["retry-after"] == "5"
            for path in ("/ready", "/health"):
                assert (await api.ask("GET", path)).status == 503
            assert (await api.ask("GET", "/live")).status == 200
            assert (await api.ask("GET", "/v1/models")).status == 200
            api.engine.release()
            answer = await call.end()
            assert answer.events[-1] == "[DONE]"
            await draining

        api.run(go())
        assert api.engine.drained == 5.0


def test_a_dead_engine_fails_what_runs_and_what_comes() -> None:
    with Api() as api:

        async def go() -> None:
            api.engine.held = True
            plain = api.call("POST", "/v1/completions", PROMPT)
            silent = api.call("POST", "/v1/completions", {**PROMPT, "stream": True})
            await api.until(lambda: len(api.engine.requests) == 2)
            api.hub.engine_died("the engine process was ended by signal 9")
            for call in (plain, silent):
                answer = await call.end()
                assert answer.status == 503 and answer.error["code"] == "engine_dead"
            refused = await api.ask("POST", "/generate", {"text": "a"})
            assert refused.status == 503 and "signal 9" in refused.error["message"]
            assert (await api.ask("GET", "/health")).status == 503
            assert (await api.ask("GET", "/metrics")).status == 200

        api.run(go())


def test_engine_refusals_keep_their_status() -> None:
    with Api() as api:
        api.engine.trouble = lambda request, said: Fault(429, "queue_full", "9 requests are waiting; try later")
        for stream in (False, True):
            answer = api.complete(stream=stream)
            assert answer.status == 429 and answer.headers["retry-after"] == "1"
            assert answer.error == {
                "message": "9 requests are waiting; try later",
                "type": "rate_limit_error",
                "param": None,
                "code": "queue_full",
            }


def test_a_full_queue_tells_when_to_come_back() -> None:
    with Api() as api:
        api.engine.trouble = lambda request, said: Fault(429, "queue_full", "full", retry_after=12.3)
        for path, body in (
            ("/v1/completions", {"model": "tiny", "prompt": "a"}),
            ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
            ("/api/generate", {"model": "tiny", "prompt": "Hi"}),
        ):
            answer = api.post(path, body)
            assert answer.status == 429 and answer.headers["retry-after"] == "13"


def test_metrics_can_be_switched_off() -> None:
    with Api({"observe": {"disable_metrics": True}}) as api:
        assert api.get("/metrics").status == 404
        assert "/metrics" not in api.get("/").json["routes"]


# ---- fields: the value, the field that the error names


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [-1, 1.5, "10x", 1e30, [], True, 1.0, {}])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "min_tokens"])
def test_bad_token_limits(api: Api, name: str, value: Any, stream: bool) -> None:
    for answer in (
        api.post("/v1/completions", {**PROMPT, "max_tokens": None, name: value, "stream": stream}),
        api.post("/v1/chat/completions", {**CHAT, "max_tokens": None, name: value, "stream": stream}),
    ):
        assert answer.status == 400 and answer.error["param"] == name
        assert "max_new" not in answer.error["message"] and "min_new" not in answer.error["message"]


OPENAI = [
    ("temperature", [-0.1, "hot", [], True, 10**400]),
    ("top_p", [0, 1.1, -1, "x"]),
    ("top_k", [0, -2, 1.5, "x", True]),
    ("min_p", [-0.1, 1.5]),
    ("repetition_penalty", [0, -1, 2.5]),
    ("presence_penalty", [2.1, -3]),
    ("frequency_penalty", [-2.1, 3]),
    ("seed", ["a", 1.5, 2**63, True]),
    ("n", [0, -1, 6, "2", 1.5]),
    ("stop", [5, [1], ["a"] * 4, {"a": 1}, ["x" * 5000]]),
    ("stop_regex", ["(", ["a("], 4]),
    ("stop_token_ids", [["a"], [VOCAB], [-1], 5, [1] * 4]),
    ("logit_bias", [{"x": 1}, {str(VOCAB): 5, "100": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, {"1": True}, [1],
                    {"1_0": 1}, {"9" * 5000: 1}]),
    ("ignore_eos", ["yes", 1]),
    ("stream", ["yes", 1]),
    ("stream_interval", [0, "x", 10**30]),
    ("stream_options", ["x", {"include_usage": 1}]),
    ("rid", [5, "x" * 600]),
    ("cache_salt", [5, "x" * 600]),
    ("priority", ["high", 2**40]),
    ("skip_special_tokens", [0]),
    ("model", [5, [], "", None]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in OPENAI for value in values])
def test_bad_values_name_their_field(api: Api, name: str, value: Any) -> None:
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        raw = None
        if value == 10**400:
            raw = (
                b'{"model": "tiny", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "temperature": 1%s}'
                % (b"0" * 400)
            )
        answer = api.post(path, {**body, name: value}, raw=raw)
        assert answer.status == 400, answer.body
        assert answer.error["param"] == name
        assert name in answer.error["message"]
        assert len(answer.body) < 2048


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_new_tokens", -1), ("max_new_tokens", 1.5), ("temperature", True), ("top_p", 0), ("sampling_seed", "x"),
     ("stop", [1]), ("stop_token_ids", [VOCAB]), ("n", 0), ("n", 6), ("min_new_tokens", 500), ("logit_bias", {"a": 1}),
     ("max_tokens", 4), ("temprature", 1), ("no_stop_trim", 3)],
)  # fmt: skip
def test_bad_native_values_name_their_field(api: Api, name: str, value: Any) -> None:
    answer = api.generate(sampling_params={name: value})
    assert answer.status == 400
    assert answer.error["param"] in (f"sampling_params.{name}", name)


def test_a_mistyped_native_parameter_is_answered_with_the_nearest(api: Api) -> None:
    assert "did you mean temperature?" in api.generate(sampling_params={"temprature": 1}).error["message"]


def test_ids_out_of_the_vocabulary(api: Api) -> None:
    for bad in ([-1, 100], [VOCAB], [4611686018427387911], [1, 2**70]):
        for answer in (
            api.complete(prompt=bad),
            api.complete(prompt=[[1], bad]),
            api.generate(text=None, input_ids=bad),
        ):
            assert answer.status == 400 and "out of vocabulary" in answer.error["message"]
            assert str(VOCAB - 1) in answer.error["message"]
    for bad in ([1.5], [True], [None], ["a", 1], [1, "a"], [[1], "a"], [[1], 2], {"a": 1}, 5, True):  # type: ignore[assignment]
        answer = api.complete(prompt=bad)
        assert answer.status == 400 and answer.error["param"] == "prompt", bad
    assert api.complete(prompt=[VOCAB - 1]).status == 200
    assert api.complete(logit_bias={str(VOCAB - 1): 1}, max_tokens=1).status == 200


def test_empty_prompts(api: Api) -> None:
    for empty in ("", [""], [], [[]], [[], [1]]):
        answer = api.complete(prompt=empty)
        assert answer.status == 400 and answer.error["param"] == "prompt"
    assert api.complete(prompt=None).error["param"] == "prompt"
    assert api.generate(text="").status == 400
    assert api.generate(text=None).status == 400
    assert api.generate(text="a", input_ids=[1]).status == 400
    assert api.generate(text=[1, 2]).status == 400
    assert api.generate(text=None, input_ids="a").status == 400
    for messages in ([], None, "hello", [5], [{"content": "no role"}]):
        answer = api.chat(messages=messages)
        assert answer.status == 400 and answer.error["param"].startswith("messages"), messages
    assert api.complete().status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_longer_than_the_context(api: Api, stream: bool) -> None:
    long = [5] * (CONTEXT + 50)
    for answer in (
        api.complete(prompt=long, stream=stream),
        api.generate(text=None, input_ids=long, stream=stream),
        api.complete(prompt="the " * 4000, stream=stream),
        api.chat(messages=[{"role": "user", "content": "word " * 4000}], stream=stream),
    ):
        assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
        assert str(CONTEXT) in answer.error["message"] and answer.error["param"] in ("prompt", "input_ids", "messages")
    assert str(CONTEXT + 50) in api.complete(prompt=long).error["message"]
    full = api.complete(prompt=[5] * CONTEXT, max_tokens=1)
    assert full.status == 400 and "no room" in full.error["message"]
    assert api.complete(prompt=[5] * CONTEXT, max_tokens=0).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_cut_to_the_context_on_every_route(api: Api, stream: bool) -> None:
    prompt = [5] * (CONTEXT - 10)
    asked: list[dict[str, Any]] = [
        {"max_tokens": 100, "min_tokens": 50},
        {"max_tokens": None, "max_completion_tokens": 10**9},
    ]
    for limits in asked:
        api.complete(prompt=prompt, stream=stream, ignore_eos=True, **limits)
        sampling = api.engine.requests[-1].sampling
        assert sampling.max_new_tokens == 10 and sampling.min_new_tokens in (0, 10)
    api.generate(text=None, input_ids=prompt, stream=stream, sampling_params={"max_new_tokens": 100})
    assert api.engine.requests[-1].sampling.max_new_tokens == 10
    api.engine.script = "short"
    answer = api.chat(max_tokens=None, return_token_ids=True)
    api.engine.script = None
    assert api.engine.requests[-1].sampling.max_new_tokens == CONTEXT - answer.json["usage"]["prompt_tokens"]


def test_limits_name_themselves(api: Api) -> None:
    for answer, flag in (
        (api.complete(n=6), "max-choices"),
        (api.complete(prompt=["a"] * 9), "max-batch-items"),
        (api.complete(prompt=["a"] * 4, n=3), "max-batch-items"),
        (api.generate(text=["a"] * 9), "max-batch-items"),
        (api.generate(text=["a"] * 4, sampling_params={"n": 3}), "max-batch-items"),
        (api.complete(stop=["a"] * 4), "max-stop-strings"),
        (api.complete(logprobs=129), "max-logprobs"),
        (api.chat(logprobs=True, top_logprobs=10**6), "max-logprobs"),
        (api.generate(return_logprob=True, top_logprobs_num=129), "max-logprobs"),
    ):
        assert answer.status == 400 and flag in answer.error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("lora_path", "x"), ("use_beam_search", True)],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(api: Api, field: str, value: Any) -> None:
    for answer in (api.complete(**{field: value}), api.chat(**{field: value})):
        assert answer.status == 400
        assert (answer.error["code"], answer.error["param"]) == ("not_supported", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [("audio", {"voice": "x"}), ("web_search_options", {"a": 1}), ("modalities", ["text", "audio"]),
     ("functions", [{"name": "f"}]), ("chat_template", "{{ messages[0].content * 100000000 }}")],
)  # fmt: skip
def test_what_chat_does_not_serve(api: Api, field: str, value: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}] * 5000
    answer = api.chat(**{"tools": tools[:1], field: value})
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == ("not_supported", field)


def test_names_are_not_paths_and_are_not_repeated(api: Api) -> None:
    for name in ("../../etc/passwd", "/etc/passwd", "a\x00b", "%2e%2e%2f", "x" * 5000):
        for answer in (api.chat(model=name), api.complete(model=name), api.generate(model=name)):
            assert answer.status == 404 and answer.error["code"] == "model_not_found"
            assert answer.error["param"] == "model" and len(answer.body) < 300
            assert "etc" not in answer.body.decode()
    assert api.complete(model="org/tiny").json["model"] == "tiny"


def test_a_model_answers_to_what_the_operator_called_it() -> None:
    with Api({"model": {"model": "/models/tiny"}}) as api:
        assert api.complete(model="/models/tiny", max_tokens=1).json["model"] == "tiny"
    with Api({"model": {"model": "/models/tiny", "served_model_name": "tiny"}}) as api:
        assert api.complete(model="/models/tiny").status == 404
        assert api.get("/model_info").json["model_path"] == "tiny"


def test_errors_do_not_repeat_what_was_sent(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    secret = "SECRETMARK"
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,AAAA{secret}"}}
    with caplog.at_level(logging.DEBUG):
        answer = api.chat(messages=[{"role": "user", "content": [part]}])
    assert answer.status == 400 and "image_url" in answer.error["message"]
    assert secret not in answer.body.decode() and secret not in caplog.text


def test_null_is_the_default_everywhere(api: Api) -> None:
    nulls = dict.fromkeys(
        ("temperature", "top_p", "top_k", "n", "stop", "seed", "logit_bias", "tools", "tool_choice", "response_format",
         "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "stream", "stream_options", "user",
         "max_tokens", "best_of", "echo", "suffix", "rid", "priority", "chat_template_kwargs", "regex", "modalities")
    )  # fmt: skip
    assert api.chat(**{**nulls, "max_completion_tokens": 3}).status == 200
    answer = api.complete(**nulls)
    assert answer.status == 200 and answer.json["usage"]["completion_tokens"] <= 16
    assert api.engine.requests[-1].sampling.max_new_tokens == 16
    native = dict.fromkeys(
        ("sampling_params", "rid", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num", "input_ids",
         "image_data", "lora_path", "cache_salt", "priority", "model", "token_ids_logprob")
    )  # fmt: skip
    assert api.generate(**native).status == 200
    assert api.engine.requests[-1].sampling.max_new_tokens == 128
    assert (
        api.generate(sampling_params={"temperature": None, "regex": "", "json_schema": None, "stop": None}).status
        == 200
    )


def test_unknown_fields_are_ignored(api: Api) -> None:
    more = {"user": "u", "store": False, "metadata": {"k": "v"}, "service_tier": "auto", "parallel_tool_calls": True,
            "totally_unknown": [1], "reasoning_effort": "low", "verbosity": "low",
            "max_new_tokens": "ours"}  # fmt: skip
    assert api.chat(max_tokens=2, **more).status == 200
    assert api.complete(max_tokens=2, **more).status == 200
    assert api.generate(totally_unknown=[1], log_metrics=True).status == 200


def test_error_messages_are_bounded() -> None:
    assert len(errors.body(RadixError("x" * 100_000))) < 2048
