"""`/v1/embeddings`, `/encode` and `/v1/rerank`: forms of input and output, lengths, order, and what is refused."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixlm.base.request import Request
from radixlm.wire.messages import Fault
from support.server import Api, facts, tokenizer, vector_of

WORDS = tokenizer()
SIZE = facts().model.hidden_size


@pytest.fixture(scope="module")
def shared() -> Iterator[Api]:
    with Api({"limits": {"max_batch_items": 8}}) as api:
        yield api


@pytest.fixture
def api(shared: Api) -> Iterator[Api]:
    yield shared
    shared.engine.trouble = lambda request, said: None


def embed(api: Api, **fields: Any) -> Any:
    return api.post("/v1/embeddings", {"model": "tiny", "input": "Hello world", **fields})


def expected(api: Api, size: int = SIZE) -> list[float]:
    """The vector of the request that the engine saw last."""
    vector = vector_of(api.engine.requests[-1])[:size]
    return (vector / math.sqrt(float((vector**2).sum()))).tolist()  # type: ignore[no-any-return]


def test_an_answer(api: Api) -> None:
    body = embed(api, request_id="mine").json
    count = len(WORDS.encode("Hello world"))
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": pytest.approx(expected(api))}],
        "model": "tiny",
        "usage": {"prompt_tokens": count, "total_tokens": count},
        "id": "mine",
    }
    request = api.engine.requests[-1]
    assert (request.pooling, request.sampling.max_new_tokens, request.rid) == ("last", 0, "mine")


def test_base64_equals_float(api: Api) -> None:
    plain = embed(api).json["data"][0]["embedding"]
    coded = base64.b64decode(embed(api, encoding_format="base64").json["data"][0]["embedding"])
    assert list(struct.unpack(f"<{SIZE}f", coded)) == pytest.approx(plain, abs=1e-6)
    assert embed(api, encoding_format="float").json["data"][0]["embedding"] == plain


@pytest.mark.parametrize("stream", [False, True])
def test_batches_keep_their_order(api: Api, stream: bool) -> None:
    """`stream` is no field of this route: it is ignored."""
    texts = ["one", "Hello world", "two"]
    many = embed(api, input=texts, stream=stream).json
    assert [item["index"] for item in many["data"]] == [0, 1, 2]
    for text, item in zip(texts, many["data"], strict=True):
        assert embed(api, input=text).json["data"][0]["embedding"] == item["embedding"]
    assert many["usage"]["prompt_tokens"] == sum(len(WORDS.encode(text)) for text in texts)


def test_ids(api: Api) -> None:
    ids = WORDS.encode("Hello world")
    text = embed(api, rid="x").json
    assert embed(api, input=ids, rid="x").json == text
    assert embed(api, input=[ids, [1]]).json["data"][0] == text["data"][0]


@pytest.mark.parametrize("size", [1, 3, SIZE])
def test_shorter_vectors_have_length_one(api: Api, size: int) -> None:
    vector = embed(api, dimensions=size).json["data"][0]["embedding"]
    assert vector == pytest.approx(expected(api, size)) and len(vector) == size


def test_raw_vectors_and_pooling(api: Api) -> None:
    assert embed(api, normalize=False).json["data"][0]["embedding"] == vector_of(api.engine.requests[-1]).tolist()
    for pooling in ("first", "mean", "last"):
        assert embed(api, pooling=pooling).status == 200
        assert api.engine.requests[-1].pooling == pooling


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [999_999]}, "input"),
        ({"input": "a" * 100_000}, "input"),
        ({"input": ["a"] * 9}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": -1}, "dimensions"),
        ({"dimensions": 10**9}, "dimensions"),
        ({"dimensions": 2.0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"model": None}, "model"),
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
    ],
)
def test_refusals(api: Api, fields: dict[str, Any], param: str) -> None:
    answer = embed(api, **fields)
    assert answer.status == 400 and answer.error["param"] == param


def test_other_models_are_not_found(api: Api) -> None:
    assert embed(api, model="other").status == 404


def test_a_failure_is_an_error(api: Api) -> None:
    api.engine.trouble = lambda request, said: (
        Fault(500, "model_error", "not finite") if len(request.tokens) < 3 else None
    )
    answer = embed(api, input=["Hello world and more", "a"])
    assert answer.status == 500 and answer.error["code"] == "model_error"


def test_native(api: Api) -> None:
    one = api.post("/encode", {"text": "Hello world", "rid": "mine"}).json
    assert one["embedding"] == pytest.approx(expected(api))
    assert one["meta_info"] == {"id": "mine", "prompt_tokens": len(WORDS.encode("Hello world")), "cached_tokens": 0}
    many = api.post("/encode", {"input_ids": [[1], [2, 3]]}).json
    assert [item["meta_info"]["prompt_tokens"] for item in many] == [1, 2]
    assert api.post("/encode", {"text": "a", "input_ids": [1]}).error["param"] == "text"


# ---- rerank


def rerank(api: Api, **fields: Any) -> Any:
    body = {"model": "tiny", "query": "the quick fox", "documents": ["blue bicycle", "the quick fox", "the fox"]}
    return api.post("/v1/rerank", {**body, **fields})


def test_documents_are_ranked(api: Api) -> None:
    body = rerank(api, rid="mine").json
    results = body["results"]
    assert results[0]["index"] == 1 and results[0]["relevance_score"] == pytest.approx(1.0)
    assert sorted(item["index"] for item in results) == [0, 1, 2]
    scores = [item["relevance_score"] for item in results]
    assert scores == sorted(scores, reverse=True) and all(-1 <= score <= 1 for score in scores)
    assert results[0]["document"] == {"text": "the quick fox"}
    assert body["id"] == "mine" and body["usage"]["total_tokens"] > 0
    for path in ("/rerank", "/v2/rerank"):
        assert api.post(path, {"query": "a", "documents": ["b"]}).status == 200


def test_the_best_few(api: Api) -> None:
    full = rerank(api).json["results"]
    assert rerank(api, top_n=2).json["results"] == full[:2]
    assert rerank(api, top_n=99).json["results"] == full
    bare = rerank(api, return_documents=False, documents=[{"text": "a"}, "b"]).json["results"]
    assert all("document" not in item for item in bare)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": None}, "query"),
        ({"query": ""}, "query"),
        ({"query": ["a"]}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": [1]}, "documents"),
        ({"documents": [{"title": "a"}]}, "documents"),
        ({"documents": [""]}, "documents"),
        ({"documents": ["a"] * 9}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"instruct": "be strict"}, "instruct"),
    ],
)
def test_rerank_refusals(api: Api, fields: dict[str, Any], param: str) -> None:
    answer = rerank(api, **fields)
    assert answer.status == 400 and answer.error["param"] == param


# ---- anything


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([2**63, 10**30, 1.5]) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
NAMES = {
    "/v1/embeddings": ["model", "input", "dimensions", "encoding_format", "pooling", "normalize", "rid", "priority"],
    "/encode": ["text", "input_ids", "dimensions", "pooling", "cache_salt", "add_special_tokens", "encoding_format"],
    "/v1/rerank": ["model", "query", "documents", "top_n", "return_documents", "pooling", "cache_salt"],
}


@pytest.mark.parametrize("path", list(NAMES))
def test_any_value_in_any_field(api: Api, path: str) -> None:
    base = {"/v1/embeddings": {"model": "tiny", "input": "a"}, "/encode": {"text": "a"}}
    begin = base.get(path, {"query": "a", "documents": ["b"]})

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.dictionaries(st.sampled_from(NAMES[path]), values, max_size=3))
    def run(fields: dict[str, Any]) -> None:
        answer = api.post(path, {**begin, **fields})
        assert answer.status in (200, 400, 404), (answer.status, answer.body, fields)
        if answer.status != 200:
            assert answer.error["message"]
        else:
            json.loads(answer.body)
        assert not api.hub.in_flight

    run()


def test_requests_share_prefixes_only_within_their_salt(api: Api) -> None:
    seen: list[Request] = api.engine.requests
    embed(api, cache_salt="a")
    embed(api)
    assert seen[-2].namespace != seen[-1].namespace == ""
