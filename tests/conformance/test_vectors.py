"""Vectors from a live server, through the official `openai` client: of a real encoder, and of a decoder."""

from __future__ import annotations

import base64
import struct
from typing import Any

import openai
import pytest
from openai import OpenAI

from support.live import Server, together

TEXTS = ["A man is eating food.", "A man is eating a piece of bread.", "The stock market fell today."]


def connect(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_likeness(embedder: Server) -> None:
    with connect(embedder) as client:
        answer = client.embeddings.create(model="all-minilm-l6-v2", input=TEXTS)
        vectors = [item.embedding for item in answer.data]
        assert [len(vector) for vector in vectors] == [384] * 3
        assert dot(vectors[0], vectors[0]) == pytest.approx(1.0, abs=1e-5)
        assert dot(vectors[0], vectors[1]) == pytest.approx(0.74, abs=0.02)
        assert abs(dot(vectors[0], vectors[2])) < 0.1
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 20
        floats = client.embeddings.create(model="all-minilm-l6-v2", input=TEXTS[0], encoding_format="float")
        assert floats.data[0].embedding == pytest.approx(vectors[0], abs=1e-6)


def test_base64_and_dimensions(embedder: Server) -> None:
    body = {"model": "all-minilm-l6-v2", "input": "Hello"}
    coded = embedder.ask("/v1/embeddings", {**body, "encoding_format": "base64"})["data"][0]["embedding"]
    plain = embedder.ask("/v1/embeddings", {**body, "encoding_format": "float"})["data"][0]["embedding"]
    assert list(struct.unpack("<384f", base64.b64decode(coded))) == pytest.approx(plain, abs=1e-6)
    cut = embedder.ask("/v1/embeddings", {**body, "dimensions": 8})["data"][0]["embedding"]
    assert len(cut) == 8 and dot(cut, cut) == pytest.approx(1.0, abs=1e-5)
    with connect(embedder) as client:
        for bad in (0, -1, 10**9):
            with pytest.raises(openai.BadRequestError, match="dimensions"):
                client.embeddings.create(model="all-minilm-l6-v2", input="Hello", dimensions=bad)


def test_an_encoder_does_not_chat(embedder: Server) -> None:
    with connect(embedder) as client, pytest.raises(openai.BadRequestError, match="embeddings"):
        client.completions.create(model="all-minilm-l6-v2", prompt="Hello")
    with connect(embedder) as client, pytest.raises(openai.BadRequestError, match="context length is 512"):
        client.embeddings.create(model="all-minilm-l6-v2", input="word " * 600)


def test_many_at_once(embedder: Server) -> None:
    """A vector does not depend on who else is computed beside it."""
    texts = [("word " * n).strip() for n in (1, 3, 60, 200, 7, 1, 33, 90)]

    def one(text: str) -> Any:
        return embedder.ask("/encode", {"text": text})["embedding"]

    alone = [one(text) for text in texts]
    for found, wanted in zip(together([lambda text=text: one(text) for text in texts]), alone, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)


def test_rerank(embedder: Server) -> None:
    body = {"model": "all-minilm-l6-v2", "query": TEXTS[0], "documents": [TEXTS[2], TEXTS[1]], "top_n": 1}
    (best,) = embedder.ask("/v1/rerank", body)["results"]
    assert best["index"] == 1 and best["relevance_score"] == pytest.approx(0.74, abs=0.02)


def test_a_decoder_makes_vectors_too(plain: Server) -> None:
    with connect(plain) as client:
        for pooling in ("last", "mean", "first"):
            one = client.embeddings.create(model="tiny", input="Hello there", extra_body={"pooling": pooling})
            two = client.embeddings.create(
                model="tiny", input=["Hello", "Hello there"], extra_body={"pooling": pooling}
            )
            assert one.data[0].embedding == pytest.approx(two.data[1].embedding, abs=1e-3)
