"""Clients that leave, read slowly or wait; streams that fail half-way; work that must not stop the event loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from radixlm.api import sse
from radixlm.wire.messages import Fault
from support.server import Api, Call, parse_events, tokenizer

PROMPT = {"model": "tiny", "prompt": "Say it:", "max_tokens": 100, "ignore_eos": True, "seed": 3}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", PROMPT),
    (
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, "seed": 3},
    ),
    ("/generate", {"text": "Say it:", "sampling_params": {"seed": 3}}),
]


@pytest.fixture
def api() -> Iterator[Api]:
    with Api() as api:
        yield api


async def running(api: Api, count: int) -> None:
    await api.until(lambda: len(api.engine.running) >= count)


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_work_in_any_state(
    api: Api, path: str, body: dict[str, Any], stream: bool
) -> None:
    async def go() -> None:
        # before the first token
        api.engine.held = True
        call = api.call("POST", path, {**body, "stream": stream})
        await running(api, 1)
        await call.disconnect()
        await api.settled()
        assert [reason for _, reason in api.engine.cancelled] == ["the client left"]
        assert call.status == 0 and api.engine.tokens == 0
        # in the middle
        api.engine.held, api.engine.pace = False, 0.001
        call = api.call("POST", path, {**body, "stream": stream})
        await running(api, 1)
        if stream:
            await call.events(2)
        await call.disconnect()
        said = api.engine.tokens
        await api.settled()
        assert len(api.engine.cancelled) == 2 and not api.engine.running
        await asyncio.sleep(0.01)
        assert api.engine.tokens <= said + 1
        assert api.hub.in_flight == 0

    api.run(go())


def test_every_choice_ends_when_the_client_leaves(api: Api) -> None:
    async def go() -> None:
        api.engine.pace = 0.001
        call = api.call("POST", "/v1/completions", {**PROMPT, "n": 4, "prompt": ["a", "b"], "stream": True})
        await call.events(3)
        await call.disconnect()
        await api.settled()
        assert len(api.engine.cancelled) == 8

    api.run(go())


def test_a_client_that_leaves_while_it_sends(api: Api) -> None:
    async def go() -> None:
        call = api.call("POST", "/v1/completions", raw=b"", headers={"content-type": "application/json"})
        call.hold_body()
        await api.settle()
        await call.disconnect()
        assert not api.engine.requests

    api.run(go())


def test_many_streams_of_which_half_leave(api: Api) -> None:
    """Nothing is left behind, and those that stay are complete and equal to what they are alone."""
    chance = random.Random(1)

    async def go() -> None:
        bodies = [{**PROMPT, "prompt": f"prompt {i}", "max_tokens": 20, "seed": i, "stream": True} for i in range(60)]
        alone = [await api.ask("POST", "/v1/completions", {**body, "stream": False}) for body in bodies]
        api.engine.pace = 0.0005
        calls = [api.call("POST", "/v1/completions", body) for body in bodies]

        async def leave(call: Call) -> None:
            await asyncio.sleep(chance.random() * 0.02)
            await call.disconnect()

        leavers = [asyncio.create_task(leave(call)) for call in calls[::2]]
        await asyncio.gather(*leavers)
        for call, whole in list(zip(calls, alone, strict=True))[1::2]:
            events = (await call.end()).events
            assert events[-1] == "[DONE]"
            text = "".join(choice["text"] for chunk in events[:-1] for choice in chunk["choices"])
            assert text == whole.json["choices"][0]["text"]
        await api.settled()
        assert api.hub.in_flight == 0 and not api.hub._live

    api.run(go())


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_slow_reader_gets_everything_in_few_pieces(api: Api, path: str, body: dict[str, Any]) -> None:
    async def go() -> None:
        fast = await api.call("POST", path, {**body, "stream": True, "seed": 1, "sampling_params": {"seed": 1}}).end()
        call = api.call("POST", path, {**body, "stream": True, "seed": 1, "sampling_params": {"seed": 1}})
        await call.events(1)
        call.pause()
        await api.settled()  # the engine ends long before the reader does
        sends = call.sends
        call.resume()
        slow = await call.end()
        assert call.sends - sends <= 4
        assert text_of(slow.events) == text_of(fast.events)

    api.run(go())


def test_a_reader_that_lets_too_much_wait_is_told_and_cut(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "UNREAD_BYTES", 2000)

    async def go() -> None:
        call = api.call(
            "POST",
            "/v1/completions",
            {"model": "tiny", "prompt": "a", "max_tokens": 400, "stream": True, "logprobs": 5},
        )
        await call.events(1)
        call.pause()
        await api.until(lambda: bool(api.engine.cancelled))
        assert api.engine.tokens < 100, "it went on although nobody reads"
        call.resume()
        events = (await call.end()).events
        assert events[-1]["error"]["code"] == "slow_reader" and "[DONE]" not in events
        await api.settled()
        assert api.hub.in_flight == 0

    api.run(go())


def test_a_reader_that_takes_nothing_is_cut_in_time(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sse, "UNREAD_SECONDS", 0.05)

    async def go() -> None:
        api.engine.pace = 0.01
        call = api.call("POST", "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 400}, "stream": True})
        await call.events(1)
        call.pause()
        await call.task  # the server ends it by itself
        assert call.body.count(b"data: ") < 10
        await api.settled()
        assert [reason for _, reason in api.engine.cancelled] == ["the client left"]

    api.run(go())
    api.engine.pace = 0.0
    assert "taken nothing" in caplog.text


def test_an_answer_in_one_piece_is_bounded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "WHOLE_BYTES", 20_000)
    fields = {"prompt": "a", "max_tokens": 400}
    assert api.complete(**fields).status == 200
    refused = api.complete(**fields, logprobs=20)
    assert refused.status == 413 and "log-probabilities" in refused.error["message"]
    api.run(api.settled())
    assert api.hub.in_flight == 0


def text_of(events: list[Any]) -> str:
    if "text" in events[0]:
        return str(events[-2]["text"])
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for chunk in events[:-1]
        for choice in chunk["choices"]
    )


def test_silence_is_filled_with_comments() -> None:
    with Api({"server": {"sse_keepalive": 0.01}}) as api:

        async def go() -> None:
            api.engine.held = True
            call = api.call("POST", "/v1/chat/completions", {**ROUTES[1][1], "stream": True})
            await call.until(lambda: call.body.count(b": keep-alive\n\n") >= 3)
            assert call.status == 200
            api.engine.release()
            events = (await call.end()).events
            assert events[-1] == "[DONE]" and events[0] == ": keep-alive"
            # a failure now has to be an event
            api.engine.held = True
            api.engine.trouble = lambda request, said: Fault(429, "queue_full", "full")
            call = api.call("POST", "/v1/completions", {**PROMPT, "stream": True})
            await call.until(lambda: b"keep-alive" in call.body)
            api.engine.release()
            events = (await call.end()).events
            assert events[-1] == {
                "error": {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"}
            }

        api.run(go())


def test_no_comments_where_they_are_switched_off() -> None:
    with Api({"server": {"sse_keepalive": 0.0}}) as api:

        async def go() -> None:
            api.engine.held = True
            call = api.call("POST", "/v1/completions", {**PROMPT, "stream": True})
            await asyncio.sleep(0.03)
            assert call.status == 0
            api.engine.release()
            assert ":" not in [event[:1] for event in (await call.end()).events if isinstance(event, str)]

        api.run(go())


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_stream_that_fails_half_way_ends_with_an_error_and_without_done(
    api: Api, path: str, body: dict[str, Any]
) -> None:
    api.engine.trouble = lambda request, said: Fault(500, "model_error", "not a number") if said == 8 else None
    api.engine.pace = 0.01  # news that come together would be told together
    answer = api.post(path, {**body, "stream": True})
    assert answer.status == 200 and "[DONE]" not in answer.events
    assert answer.events[-1]["error"]["message"] == "not a number" and len(answer.events) > 2
    assert api.engine.requests and not api.engine.running


def test_one_choice_that_fails_ends_the_others(api: Api) -> None:
    def trouble(request: Any, said: int) -> Fault | None:
        return Fault(500, "model_error", "no") if request.uid == api.engine.requests[1].uid and said == 2 else None

    api.engine.trouble = trouble
    api.engine.pace = 0.001

    async def go(stream: bool) -> Any:
        api.engine.requests.clear()
        answer = await api.ask("POST", "/v1/completions", {**PROMPT, "n": 3, "max_tokens": 400, "stream": stream})
        await api.settled()
        return answer

    streamed = api.run(go(True))
    assert streamed.events[-1]["error"]["code"] == "model_error"
    assert len(api.engine.cancelled) == 2
    plain = api.run(go(False))
    assert plain.status == 500 and plain.error["code"] == "model_error"
    assert len(api.engine.cancelled) == 4


@pytest.mark.parametrize("stream", [True, False])
def test_abort_by_id_ends_every_choice(api: Api, stream: bool) -> None:
    async def go() -> None:
        api.engine.pace = 0.001
        assert (await api.ask("POST", "/abort_request", {"rid": "nope"})).json == {"aborted": 0}
        call = api.call("POST", "/v1/completions", {**PROMPT, "max_tokens": 400, "n": 2, "rid": "r1", "stream": stream})
        other = api.call("POST", "/v1/completions", {**PROMPT, "max_tokens": 30, "rid": "r2"})
        await running(api, 3)
        await api.settle(20)
        assert (await api.ask("POST", "/abort_request", {"rid": "r1"})).json == {"aborted": 2}
        answer = await call.end()
        if stream and answer.status == 200:
            assert answer.events[-1]["error"]["code"] == "aborted" and "[DONE]" not in answer.events
        else:
            assert answer.status == 499 and answer.error["code"] == "aborted"
        assert (await api.ask("POST", "/abort_request", {"rid": "r1"})).json == {"aborted": 0}
        assert (await other.end()).json["usage"]["completion_tokens"] == 30
        for body in ({}, {"rid": ""}, {"rid": None, "abort_all": False}, {"rid": 5}):
            assert (await api.ask("POST", "/abort_request", body)).error["param"] == "rid"

    api.run(go())


def test_an_abort_while_draining_can_be_tried_again_elsewhere(api: Api) -> None:
    async def go() -> None:
        api.engine.held = True
        call = api.call("POST", "/v1/completions", PROMPT)
        await running(api, 1)
        draining = asyncio.create_task(api.hub.drain(1.0))
        await api.settle()
        api.hub.abort_all("the server is shutting down")
        answer = await call.end()
        assert answer.status == 503 and "retry-after" in answer.headers
        await draining

    api.run(go())


def test_equal_request_ids_do_not_mix(api: Api) -> None:
    async def go() -> None:
        body = {**PROMPT, "max_tokens": 30, "rid": "same", "stream": True}
        calls = [api.call("POST", "/v1/completions", {**body, "prompt": text}) for text in ("A", "B")]
        together = [await call.end() for call in calls]
        third = await api.ask("POST", "/v1/completions", {**body, "prompt": "A"})
        assert text_of(together[0].events) == text_of(third.events) != text_of(together[1].events)
        assert {chunk["id"] for chunk in third.events[:-1]} == {"same"}

    api.engine.requests.clear()
    # greedy, so that the text is the prompt's alone
    PROMPT["temperature"] = 0
    try:
        api.run(go())
    finally:
        del PROMPT["temperature"]


def test_deadlines_travel_with_the_request() -> None:
    with Api({"schedule": {"request_timeout": 30.0}}) as api:
        api.complete(max_tokens=1)
        request = api.engine.requests[-1]
        assert request.deadline == pytest.approx(request.arrival + 30.0)


def test_long_texts_do_not_stop_the_loop() -> None:
    """While a text of megabytes is tokenized, rendered or refused, health answers and a stream goes on."""
    with Api({"limits": {"max_body_bytes": 32 << 20}}) as api:
        tokenizer()

        async def go() -> None:
            gaps: list[float] = []

            async def watch() -> None:
                while True:
                    begin = time.perf_counter()
                    assert (await api.ask("GET", "/health")).status == 200
                    await asyncio.sleep(0.005)
                    gaps.append(time.perf_counter() - begin)

            watching = asyncio.create_task(watch())
            long = "word " * 1_000_000
            for path, body in (
                ("/v1/completions", {"model": "tiny", "prompt": long}),
                ("/v1/completions", {"model": "tiny", "prompt": "a" * 1_000_000}),
                ("/generate", {"text": long}),
                ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": long}]}),
            ):
                answer = await api.ask("POST", path, body)
                assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
            counted = await api.ask("POST", "/tokenize", {"prompt": "word " * 100_000})
            assert counted.json["count"] > 100_000
            watching.cancel()
            assert len(gaps) > 10 and max(gaps) < 1.0

        api.run(go(), seconds=60)


def test_a_broken_form_is_a_clean_end(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug while a stream is written ends that stream with an error event, and its sequences with it."""
    from radixlm.api.protocols import openai_completions

    real = openai_completions.Completions.piece

    def broken(self: Any, index: int, delta: Any) -> Any:
        if delta.completion_tokens > 2:
            raise KeyError("/secret/path")
        return real(self, index, delta)

    monkeypatch.setattr(openai_completions.Completions, "piece", broken)
    api.engine.pace = 0.001
    answer = api.complete(max_tokens=300, stream=True, ignore_eos=True)
    assert answer.status == 200 and answer.events[-1]["error"]["code"] == "internal_error"
    assert b"secret" not in answer.body
    api.run(api.settled())
    assert len(api.engine.cancelled) == 1
    assert parse_events(answer.body)
