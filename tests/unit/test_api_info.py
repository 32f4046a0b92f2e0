"""Routes that tell of the server, and those that turn text into tokens and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.server import CONTEXT, Api, tokenizer

WORDS = tokenizer()
VOCAB = WORDS.vocab_size + 16


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with Api() as api:
        yield api


def test_models(api: Api) -> None:
    body = api.get("/v1/models").json
    assert body["object"] == "list"
    (card,) = body["data"]
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == (
        "tiny",
        "model",
        "radixlm",
        CONTEXT,
    )
    assert isinstance(card["created"], int) and "/secret" not in str(body)
    assert api.get("/v1/models/tiny").json == api.get("/v1/models/org%2Ftiny").json == card
    for unknown in ("nope", "..%2F..%2Fetc%2Fpasswd", "", "tiny/x"):
        answer = api.get(f"/v1/models/{unknown}")
        assert answer.status == 404 and answer.error["code"] == "model_not_found"
        assert "etc" not in answer.error["message"]


def test_info(api: Api) -> None:
    info = api.get("/model_info").json
    assert info == api.get("/get_model_info").json
    assert info["served_model_name"] == "tiny" and info["context_length"] == CONTEXT and info["has_chat_template"]
    assert info["eos_token_ids"] == list(WORDS.eos_ids)
    server = api.get("/server_info").json
    assert server.keys() == api.get("/get_server_info").json.keys()
    assert server["config"]["limits"]["max_choices"] == 128 and server["config"]["server"]["api_key"] is False
    assert server["decisions"]["attention_backend"] == {"value": "torch_ref", "reason": "first choice"}
    assert server["engine"]["running"] == 0 and server["max_total_num_tokens"] == 4096
    hello = api.get("/").json
    assert hello["name"] == "radixlm" and "/v1/chat/completions" in hello["routes"]
    assert api.get("/version").json == {"version": hello["version"]}


def test_info_does_not_wait_for_a_busy_engine(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.api.info.SCRAPE_SECONDS", 0.02)
    monkeypatch.setattr("radixlm.api.info.PROBE_SECONDS", 0.02)
    api.engine.deaf = True
    try:
        assert api.get("/server_info").json["engine"] is None
        assert api.get("/metrics").status == 200
        assert api.get("/health").status == 200
        answer = api.get("/health_generate")
        assert answer.status == 504 and answer.error["type"] == "timeout_error"
    finally:
        api.engine.deaf = False


def test_health_generates_only_where_it_says_so(api: Api) -> None:
    before = len(api.engine.requests)
    for path in ("/health", "/healthz", "/ready", "/ping", "/live"):
        assert api.get(path).status == 200
    assert len(api.engine.requests) == before
    assert api.get("/health_generate").status == 200
    assert len(api.engine.requests) == before + 1


def test_metrics_parse_and_add_up() -> None:
    with Api() as api:
        api.complete(max_tokens=7, ignore_eos=True)
        usage = {"include_usage": True, "continuous_usage_stats": True}
        stream = api.complete(max_tokens=5, stream=True, ignore_eos=True, stream_options=usage)
        at_first = stream.events[0]["usage"]["completion_tokens"]  # tokens that came together have no gap
        api.complete(max_tokens="x")
        api.get("/v1/models/nope")
        api.get("/nowhere")
        answer = api.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        samples = {}
        for family in text_string_to_metric_families(answer.body.decode()):
            for sample in family.samples:
                labels = sample.labels
                why = labels.get("status") or labels.get("finished_reason") or ""
                samples[sample.name, labels.get("endpoint", ""), why] = sample.value
        assert samples["radixlm:generation_tokens_total", "", ""] == 12
        assert samples["radixlm:request_success_total", "", "length"] == 2
        assert samples["radixlm:http_requests_total", "/v1/completions", "200"] == 2
        assert samples["radixlm:http_requests_total", "/v1/completions", "400"] == 1
        assert samples["radixlm:http_requests_total", "/v1/models/{id:path}", "404"] == 1
        assert samples["radixlm:http_requests_total", "none", "404"] == 1
        assert samples["radixlm:inter_token_latency_seconds_count", "", ""] == 5 - at_first < 5
        assert samples["radixlm:engine_up", "", ""] == 1
        openmetrics = api.get("/metrics", {"accept": "application/openmetrics-text; version=1.0.0"})
        assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
        assert openmetrics.body.endswith(b"# EOF\n")


def test_flush(api: Api) -> None:
    assert api.post("/flush_cache", {}).json == {"success": True, "flushed_tokens": 7}
    assert api.get("/flush_cache").status == 200

    async def busy() -> None:
        api.engine.held = True
        call = api.call("POST", "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2})
        await api.until(lambda: bool(api.engine.running))
        refused = await api.ask("POST", "/flush_cache")
        assert refused.status == 400 and refused.error["code"] == "busy"
        api.engine.release()
        await call.end()

    api.run(busy())


def test_tokenize_and_back(api: Api) -> None:
    for text in (" a", "a", "\n a", "é", "", "Grüße aus Wien! 42 — こんにちは 🙂  two", "x" * 10_000):
        body = api.post("/tokenize", {"model": "tiny", "prompt": text}).json
        assert body["tokens"] == WORDS.encode(text) and body["count"] == len(body["tokens"])
        assert body["max_model_len"] == CONTEXT
        back = api.post("/detokenize", {"model": "tiny", "tokens": body["tokens"]}).json
        assert back["text"] == back["prompt"] == text
    assert api.post("/v1/tokenize", {"prompt": "a b"}).json == api.post("/tokenize", {"prompt": "a b"}).json
    many = api.post("/tokenize", {"prompt": ["a b", "c"], "return_token_strs": True}).json
    assert many["tokens"] == [WORDS.encode("a b"), WORDS.encode("c")] and many["count"] == [2, 1]
    assert many["token_strs"] == [["a", " b"], ["c"]]
    assert api.post("/detokenize", {"tokens": many["tokens"]}).json["text"] == ["a b", "c"]
    assert api.post("/v1/detokenize", {"tokens": []}).json["text"] == ""


def test_tokenize_control_words(api: Api) -> None:
    text = "<|im_start|>tea or coffee<|im_end|>"
    parsed = api.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json["tokens"]
    spelled = api.post("/tokenize", {"prompt": text, "add_special_tokens": False, "parse_special": False}).json[
        "tokens"
    ]
    assert parsed[0] == WORDS.id("<|im_start|>") and parsed[-1] == WORDS.id("<|im_end|>")
    assert len(spelled) > len(parsed) + 5 and not WORDS.special_ids & set(spelled)
    for ids in (parsed, spelled):
        assert api.post("/detokenize", {"tokens": ids}).json["text"] == text
    hidden = api.post("/detokenize", {"tokens": parsed, "skip_special_tokens": True}).json["text"]
    assert hidden == "tea or coffee"


def test_tokenize_of_a_chat_counts_as_the_chat_does(api: Api) -> None:
    for extra in ({}, {"chat_template_kwargs": {"enable_thinking": False}}, {"add_generation_prompt": False}):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi <|im_end|>"}], "max_tokens": 1, **extra}
        counted = api.post("/tokenize", body).json
        assert counted["count"] == api.post("/v1/chat/completions", body).json["usage"]["prompt_tokens"]
        assert tuple(counted["tokens"]) == api.engine.requests[-1].tokens
    long = api.post("/tokenize", {"messages": [{"role": "user", "content": "word " * 1000}]})
    assert long.json["count"] > CONTEXT  # counting is not generating


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": [1, 2]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "nope"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [WORDS.vocab_size]}, "tokens"),  # padding: an id, but no token
        ("/detokenize", {"tokens": [[1], 2]}, "tokens"),
    ],
)
def test_bad_token_requests(api: Api, path: str, body: dict[str, object], param: str) -> None:
    answer = api.post(path, body)
    assert answer.status in (400, 404) and answer.error["param"] == param
