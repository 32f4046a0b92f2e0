"""CACHE and CTX-3: pages, chunks, eviction and pauses never show in an answer."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from support.live import Server, deltas, finishes, together
from support.servers import CHUNK, PAGE, SCARCE_POOL
from support.words import ids


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)


@pytest.mark.parametrize("length", LENGTHS)
def test_cache_1_prefixes_that_end_on_a_page_edge(paged: Server, length: int) -> None:
    prefix, tail, other = ids(length), ids(PAGE + 3, 1000), ids(7, 2000)
    asked = {"max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    paged.flush()
    cold = paged.complete(prompt=prefix + tail, **asked)
    assert cached(cold) == 0
    paged.flush()
    paged.complete(prompt=prefix + other, **asked)
    warm = paged.complete(prompt=prefix + tail, **asked)
    assert tokens(warm) == tokens(cold)
    assert cached(warm) == length // PAGE * PAGE
    again = together([partial(paged.complete, prompt=prefix + tail, **asked)] * 8)
    assert all(tokens(answer) == tokens(cold) for answer in again)
    assert all(cached(answer) % PAGE == 0 for answer in again)


def test_cache_1_the_prompt_itself_is_cached_but_for_its_last_token(paged: Server) -> None:
    asked = {"max_tokens": 1, "ignore_eos": True}
    paged.flush()
    for length, hit in ((PAGE, 0), (PAGE + 1, PAGE), (2 * PAGE, PAGE), (2 * PAGE + 1, 2 * PAGE)):
        paged.complete(prompt=ids(length, 3000), **asked)
        assert cached(paged.complete(prompt=ids(length, 3000), **asked)) == hit


def test_cache_2_identical_prompts_at_once(paged: Server) -> None:
    prompt = "same words here " * 50
    asked = partial(paged.complete, prompt=prompt, max_tokens=32, ignore_eos=True)
    paged.flush()
    before = paged.figures()
    first = together([asked] * 16)
    middle = paged.figures()
    second = together([asked] * 16)
    assert len({answer["choices"][0]["text"] for answer in first + second}) == 1
    length = first[0]["usage"]["prompt_tokens"]
    assert all(cached(answer) >= (length - 1) // PAGE * PAGE for answer in second)
    computed = sum(length - cached(answer) for answer in first)
    assert computed <= length + 15 * (PAGE + CHUNK), "the shared prompt was computed more than once"
    assert middle["cached_tokens"] - before["cached_tokens"] == sum(map(cached, first))


def test_cache_3_flush_while_busy(plain: Server) -> None:
    asked = {"max_tokens": 200, "ignore_eos": True}
    prompts = [ids(200, 100 * i) for i in range(4)]
    alone = [plain.text(prompt=prompt, **asked) for prompt in prompts]
    statuses: list[int] = []

    def flush_often() -> str:
        while plain.figures()["running"] < 4:
            time.sleep(0.005)
        while plain.figures()["running"] > 0:
            statuses.append(plain.post("/flush_cache").status_code)
            time.sleep(0.02)
        return ""

    streams = [partial(plain.complete_stream, prompt=prompt, **asked) for prompt in prompts]
    texts = together([*[lambda s=s: "".join(deltas(s())) for s in streams], flush_often])
    assert texts[:4] == alone
    assert statuses and set(statuses[:-1]) == {400}

    for _ in range(10):
        plain.complete_stream(prompt=prompts[0], max_tokens=5)
        begin = time.monotonic()
        response = plain.post("/flush_cache")  # right after the last [DONE]
        assert response.status_code == 200, response.text
        assert time.monotonic() - begin < 2.0
    assert cached(plain.complete(prompt=prompts[0], max_tokens=5)) == 0
    assert cached(plain.complete(prompt=prompts[0], max_tokens=5)) == 199


@pytest.mark.parametrize(
    ("sampling", "abreast"), [({"temperature": 0}, 1), ({"temperature": 1, "seed": 11, "top_k": 40}, 3)]
)
def test_cache_4_retraction_does_not_change_text(scarce: Server, sampling: dict[str, Any], abreast: int) -> None:
    """Sixteen requests of 230 tokens in a pool of 930, and first alone, or as many `abreast` as the pool holds."""
    asked = {"max_tokens": 200, "ignore_eos": True, "logprobs": 1, "return_token_ids": True, **sampling}
    prompts = [ids(30, 40 * i) for i in range(16)]

    def run(prompt: list[int]) -> tuple[list[int], list[float]]:
        chunks = scarce.complete_stream(prompt=prompt, **asked)
        assert finishes(chunks) == ["length"]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        found = [token for choice in choices for token in choice["token_ids"]]
        scores = [score for choice in choices for score in choice["logprobs"]["token_logprobs"]]
        assert len(found) == len(scores) == 200
        return found, scores

    before = scarce.figures()["retractions"]
    calls = [partial(run, prompt) for prompt in prompts]
    alone = [answer for i in range(0, 16, abreast) for answer in together(calls[i : i + abreast])]
    assert scarce.figures()["retractions"] == before
    crowd = together(calls)
    assert scarce.figures()["retractions"] > before, "nobody was paused: the pool is too large for this test"
    for (found, scores), (alone_found, alone_scores) in zip(crowd, alone, strict=True):
        assert found == alone_found
        assert scores == pytest.approx(alone_scores, abs=1e-3)


def test_cache_5_cached_tokens_is_reported(paged: Server) -> None:
    asked: dict[str, Any] = {"content": "report " * 200, "max_tokens": 2}
    paged.flush()
    assert cached(paged.chat(**asked)) == 0
    again = paged.chat(**asked)
    assert cached(again) == (again["usage"]["prompt_tokens"] - 1) // PAGE * PAGE > 0
    streamed = paged.chat_stream(**asked, stream_options={"include_usage": True})[-1]
    assert cached(streamed) == cached(again)


def test_cache_6_the_next_turn_reuses_the_last(paged: Server) -> None:
    messages = [{"role": "user", "content": "long opening " * 200}]
    first = paged.chat(messages=messages, max_tokens=32)
    messages += [first["choices"][0]["message"], {"role": "user", "content": "And now?"}]
    second = paged.chat(messages=messages, max_tokens=2)
    assert cached(second) >= first["usage"]["prompt_tokens"] - PAGE


def test_cache_salts_are_compartments(paged: Server) -> None:
    asked = {"prompt": ids(5 * PAGE), "max_tokens": 2}
    paged.flush()
    assert cached(paged.complete(**asked, cache_salt="one")) == 0
    assert cached(paged.complete(**asked, cache_salt="two")) == 0
    assert cached(paged.complete(**asked)) == 0
    assert cached(paged.complete(**asked, cache_salt="one")) == 4 * PAGE


@pytest.mark.parametrize("stream", [False, True])
def test_ctx_3_an_answer_that_outgrows_the_pool_ends(scarce: Server, stream: bool) -> None:
    begin = time.monotonic()
    asked = {"prompt": ids(SCARCE_POOL - 8, 5), "max_tokens": 64, "ignore_eos": True}
    if stream:
        chunks = scarce.complete_stream(**asked, stream_options={"include_usage": True})
        finish, count = finishes(chunks)[0], chunks[-1]["usage"]["completion_tokens"]
    else:
        answer = scarce.complete(**asked)
        finish, count = answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]
    assert time.monotonic() - begin < 30
    assert finish == "length" and 1 <= count <= 8


def test_ctx_3_a_prompt_larger_than_the_pool_is_refused(scarce: Server) -> None:
    for length in (SCARCE_POOL + 1, 2000):
        error = scarce.refused("/v1/completions", {"model": scarce.model, "prompt": ids(length), "max_tokens": 4})
        assert error["code"] == "context_length_exceeded"
        assert str(length) in error["message"] and str(SCARCE_POOL) in error["message"]


def test_metr_the_pool_adds_up(paged: Server) -> None:
    """In tokens, whatever the size of a page."""
    paged.flush()
    owners = {}
    for line in paged.get("/metrics").text.splitlines():
        if line.startswith("radixlm:kv_cache_tokens{"):
            owner = line.split('owner="')[1].split('"')[0]
            owners[owner] = float(line.rsplit(" ", 1)[1])
    pool = paged.get("/server_info").json()["pool"]
    assert owners["free"] == sum(owners.values()) == pool["pages"] * pool["page_size"]
