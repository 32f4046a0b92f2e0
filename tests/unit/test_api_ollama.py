"""Ollama's routes: lines of JSON, options, whole answers, calls, vectors, and what is told of the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from radixlm.api.protocols.ollama import chat_messages
from radixlm.api.protocols.ollama_form import Frame, OllamaForm
from radixlm.wire.messages import Fault
from support.pieces import PROMPT, chat, ending, service_of, streams
from support.server import CONTEXT, Answer, Api, facts, tokenizer

USER = [{"role": "user", "content": "Hi"}]
WORDS = tokenizer()


@pytest.fixture(scope="module")
def shared() -> Iterator[Api]:
    with Api() as api:
        yield api


@pytest.fixture
def api(shared: Api) -> Iterator[Api]:
    yield shared
    shared.engine.script = None
    shared.engine.trouble = lambda request, said: None


def talk(api: Api, **fields: Any) -> Answer:
    return api.post("/api/chat", {"model": "tiny", "messages": USER, "options": {"num_predict": 40}, **fields})


def generate(api: Api, **fields: Any) -> Answer:
    return api.post("/api/generate", {"model": "tiny", "prompt": "Hi", "options": {"num_predict": 40}, **fields})


def lines(answer: Answer) -> list[Any]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.splitlines()]


def prompt(api: Api) -> str:
    return WORDS.decode(api.engine.requests[-1].tokens, False)


FIGURES = {
    "total_duration",
    "load_duration",
    "prompt_eval_count",
    "prompt_eval_duration",
    "eval_count",
    "eval_duration",
}


def test_a_chat_streams_by_default(api: Api) -> None:
    api.engine.script = "Hello world"
    *parts, last = lines(talk(api))
    assert "".join(part["message"]["content"] for part in parts) == "Hello world"
    assert all(part["done"] is False and part["message"]["role"] == "assistant" for part in parts)
    assert last["done"] is True and last["done_reason"] == "stop" and last["message"]["content"] == ""
    assert last.keys() == {"model", "created_at", "message", "done", "done_reason", *FIGURES}
    assert all(type(last[name]) is int for name in FIGURES)
    assert last["prompt_eval_count"] == len(api.engine.requests[-1].tokens)
    assert last["eval_count"] == len(WORDS.encode("Hello world")) + 1


def test_whole_answers(api: Api) -> None:
    api.engine.script = "Hello world"
    body = talk(api, stream=False).json
    assert body["message"] == {"role": "assistant", "content": "Hello world"} and body["done"] is True
    body = generate(api, stream=False).json
    assert body["response"] == "Hello world" and body["done_reason"] == "stop"
    cut = generate(api, stream=False, options={"num_predict": 1}).json
    assert cut["done_reason"] == "length" and cut["eval_count"] == 1


def test_prompts(api: Api) -> None:
    api.engine.script = "x"
    generate(api, system="Be kind")
    assert (
        prompt(api) == "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    generate(api, raw=True)
    assert prompt(api) == "Hi"
    assert "".join(line["response"] for line in lines(generate(api, raw=True))) == "x"
    talk(api, think=False)
    assert prompt(api).endswith("<quick>")
    talk(api, tools=[{"type": "function", "function": {"name": "f"}}])
    assert "[tools: 1]" in prompt(api)
    with Api(template=None) as bare:
        assert generate(bare).status == 200
        assert prompt(bare) == "Hi"
        assert talk(bare).status == 400


def test_options_reach_the_engine(api: Api) -> None:
    options = {
        "num_predict": 7, "temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "repeat_penalty": 1.1, "seed": 3,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "stop": ["a", "b"], "num_ctx": 4096, "mirostat": 0,
        "typical_p": 1.0, "num_thread": 4, "unheard_of": True,
    }  # fmt: skip
    assert talk(api, options=options).status == 200
    request = api.engine.requests[-1]
    s = request.sampling
    assert (s.max_new_tokens, s.temperature, s.top_k, s.top_p, s.min_p) == (7, 0, 5, 0.5, 0.1)
    assert (s.repetition_penalty, s.seed, s.presence_penalty, s.frequency_penalty) == (1.1, 3, 0.5, 0.25)
    assert request.text.stop == ("a", "b")
    for everything in (-1, -2):
        talk(api, options={"num_predict": everything, "top_k": 0, "stop": "\n"}, stream=False)
        request = api.engine.requests[-1]
        assert request.sampling.max_new_tokens == CONTEXT - len(request.tokens) and request.sampling.top_k == -1


def test_names_with_a_tag(api: Api) -> None:
    assert talk(api, model="tiny:latest", stream=False).json["model"] == "tiny:latest"
    assert talk(api, model="tiny:7b").status == 404


def test_nothing_to_say_loads_the_model(api: Api) -> None:
    before = len(api.engine.requests)
    (line,) = lines(generate(api, prompt=""))
    assert line["done"] is True and line["done_reason"] == "load" and line["response"] == ""
    body = api.post("/api/chat", {"model": "tiny", "messages": [], "stream": False, "keep_alive": 0}).json
    assert body["done_reason"] == "unload" and body["message"]["content"] == ""
    assert len(api.engine.requests) == before


def test_logprobs(api: Api) -> None:
    api.engine.script = "Hello"
    body = talk(api, stream=False, logprobs=True, top_logprobs=2).json
    assert len(body["logprobs"]) == body["eval_count"]
    assert body["logprobs"][0].keys() == {"token", "logprob", "bytes", "top_logprobs"}
    parts = lines(talk(api, logprobs=True))
    assert sum(len(part.get("logprobs", [])) for part in parts) == body["eval_count"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": ["Hi"]},
        {"messages": [{"role": "user", "content": "Hi", "images": ["aGk="]}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "assistant", "tool_calls": [3]}]},
        {"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]},
        {"options": {"temperature": -1}},
        {"options": {"top_p": "x"}},
        {"options": {"mirostat": 2}},
        {"options": {"num_predict": -3}},
        {"options": [1]},
        {"format": "xml"},
        {"tools": [{"name": "f"}]},
        {"context": [1, 2]},
        {"think": 3},
        {"top_logprobs": 10**6},
        {"model": ""},
    ],
)
def test_refusals(api: Api, fields: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = talk(api, stream=stream, **fields)
        assert answer.status == 400 and answer.json.keys() == {"error"} and isinstance(answer.json["error"], str)


def test_errors(api: Api) -> None:
    missing = talk(api, model="other")
    assert missing.status == 404 and "tiny" in missing.json["error"]
    api.engine.script = "one, two, three, four"
    api.engine.trouble = lambda request, said: Fault(500, "model_error", "not finite") if said == 3 else None
    assert lines(talk(api))[-1] == {"error": "not finite"}
    assert talk(api, stream=False).status == 500


def test_calls_in_messages() -> None:
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g", "arguments": {}}}]
    made = chat_messages(
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
            {"role": "tool", "content": "1", "tool_name": "f"},
            {"role": "tool", "content": "2", "tool_name": "g"},
        ]
    )
    assert made[1]["reasoning_content"] == "hm"
    assert [call["id"] for call in made[1]["tool_calls"]] == [message["tool_call_id"] for message in made[2:]]
    assert made[1]["tool_calls"][0]["function"] == calls[0]["function"] and made[2]["name"] == "f"


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(streams())
def test_any_stream_says_what_the_whole_answer_does(shared: Api, stream: Any) -> None:
    pieces, deltas = stream
    service = service_of(shared)
    whole = msgspec.json.decode(
        OllamaForm(Frame("tiny", "message"), chat(shared), False, service).whole([ending(pieces=pieces)])
    )
    form = OllamaForm(Frame("tiny", "message"), chat(shared), True, service)
    told = [msgspec.json.decode(line) for delta in deltas for line in form.piece(0, delta)]
    told += [msgspec.json.decode(line) for line in form.last()]
    assert [line["done"] for line in told] == [False] * (len(told) - 1) + [True]
    messages = [line["message"] for line in told]
    assert "".join(m["content"] for m in messages) == whole["message"]["content"]
    assert "".join(m.get("thinking", "") for m in messages) == whole["message"].get("thinking", "")
    calls = [call for m in messages for call in m.get("tool_calls", [])]
    assert calls == whole["message"].get("tool_calls", [])
    assert [call["function"]["name"] for call in calls] == [p.text for p in pieces if p.kind == "call"]
    seconds = 1_000_000_000
    assert {name: told[-1][name] for name in FIGURES} == {name: whole[name] for name in FIGURES} == {
        "total_duration": 4 * seconds, "load_duration": 0, "prompt_eval_count": len(PROMPT),
        "prompt_eval_duration": seconds, "eval_count": 7, "eval_duration": 2 * seconds,
    }  # fmt: skip


# ---- vectors


def test_vectors(api: Api) -> None:
    one = api.post("/api/embed", {"model": "tiny", "input": "Hello world"}).json
    many = api.post("/api/embed", {"model": "tiny", "input": ["Hello world", "a"], "dimensions": 3}).json
    assert len(one["embeddings"]) == 1 and len(one["embeddings"][0]) == facts().model.hidden_size
    assert one["prompt_eval_count"] == len(WORDS.encode("Hello world"))
    assert [len(vector) for vector in many["embeddings"]] == [3, 3]
    assert sum(x * x for x in one["embeddings"][0]) == pytest.approx(1.0)
    old = api.post("/api/embeddings", {"model": "tiny", "prompt": "Hello world"}).json
    length = sum(x * x for x in old["embedding"]) ** 0.5
    assert [x / length for x in old["embedding"]] == pytest.approx(one["embeddings"][0])


def test_long_texts_are_cut_unless_forbidden(api: Api) -> None:
    long = "a b c " * CONTEXT
    assert api.post("/api/embed", {"model": "tiny", "input": long}).status == 200
    tokens = api.engine.requests[-1].tokens
    assert len(tokens) == CONTEXT and tokens[-1] == WORDS.encode(long)[-1]
    assert api.post("/api/embed", {"model": "tiny", "input": long, "truncate": False}).status == 400
    for bad in ({"input": ""}, {"input": []}, {"input": [3]}, {}, {"input": "a", "dimensions": 0}):
        assert api.post("/api/embed", {"model": "tiny", **bad}).status == 400


# ---- the model


def test_what_is_told_of_the_model(api: Api) -> None:
    (tag,) = api.get("/api/tags").json["models"]
    assert tag["name"] == tag["model"] == "tiny" and len(tag["digest"]) == 64 and tag["size"] > 0
    (loaded,) = api.get("/api/ps").json["models"]
    assert loaded["digest"] == tag["digest"] and loaded["context_length"] == CONTEXT
    assert all(part.isdigit() for part in api.get("/api/version").json["version"].split("."))
    shown = api.post("/api/show", {"model": "tiny:latest"}).json
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["llama.context_length"] == CONTEXT
    assert shown["details"]["quantization_level"] == "F32" and "im_start" in shown["template"]
    assert api.post("/api/show", {"name": "tiny"}).json == shown
    assert api.post("/api/show", {"model": "other"}).status == 404
