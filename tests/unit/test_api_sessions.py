"""Sessions: turns in a tree, what a new one goes on from, names, time-outs, and clients that leave in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixlm.api.sessions import Place, Sessions, Turn
from radixlm.base.errors import RadixError
from radixlm.wire.messages import Fault
from support.server import Answer, Api, tokenizer

WORDS = tokenizer()


@pytest.fixture(scope="module")
def shared() -> Iterator[Api]:
    with Api() as api:
        yield api


@pytest.fixture
def api(shared: Api) -> Iterator[Api]:
    shared.engine.script = "one"
    yield shared
    shared.engine.script = None
    shared.engine.trouble = lambda request, said: None
    shared.engine.held = False
    shared.engine.closed.clear()


@pytest.fixture
def session(api: Api) -> Iterator[str]:
    name = api.post("/open_session", {}).json
    assert isinstance(name, str)
    yield name
    api.post("/close_session", {"session_id": name})


def turn(api: Api, text: str, session: str, rid: str = "", **fields: Any) -> Answer:
    params = {"id": session, **{name: fields.pop(name) for name in list(fields) if name in PARAMS}}
    if "after" in fields:
        params["rid"] = fields.pop("after")
    return api.post("/generate", {"text": text, "rid": rid or None, "session_params": params, **fields})


PARAMS = ("offset", "replace", "drop_previous_output")


def seen(api: Api) -> str:
    return WORDS.decode(api.engine.requests[-1].tokens, False)


END = "<|im_end|>"


def test_turns_go_on_from_each_other(api: Api, session: str) -> None:
    first = turn(api, "Hello", session, "t1").json
    assert first["meta_info"]["id"] == "t1" and seen(api) == "Hello"
    assert api.engine.requests[-1].session == session
    turn(api, " two", session, "t2", after="t1")
    assert seen(api) == f"Helloone{END} two"
    turn(api, " three", session, "t3", after="t2", stream=True)
    assert seen(api) == f"Helloone{END} twoone{END} three"
    turn(api, " other", session, "t4", after="t1")
    assert seen(api) == f"Helloone{END} other"
    turn(api, " new", session, "t5")
    assert seen(api) == " new"
    turn(api, "!", session, "t6", after="t3", drop_previous_output=True)
    assert seen(api) == f"Helloone{END} twoone{END} three!"
    turn(api, "?", session, "t7", after="t3", offset=len(WORDS.encode("Hello")))
    assert seen(api) == "Hello?"
    by_ids = api.post("/generate", {"input_ids": [5, 6], "session_params": {"id": session, "rid": "t1"}})
    assert by_ids.status == 200 and api.engine.requests[-1].tokens[-2:] == (5, 6)
    unnamed = by_ids.json["meta_info"]["id"]
    turn(api, "x", session, after=unnamed)
    assert seen(api).endswith("x")


def test_replacing(api: Api, session: str) -> None:
    for name, after in (("a", None), ("b", "a"), ("c", "b"), ("d", "a")):
        turn(api, name, session, name, **({"after": after} if after else {}))
    turn(api, "e", session, "e", after="a", replace=True)
    assert turn(api, "x", session, after="c").error["param"] == "session_params.rid"
    assert turn(api, "x", session, after="d").status == 400
    assert turn(api, "x", session, after="e").status == 200
    turn(api, "f", session, "f", replace=True)
    assert turn(api, "x", session, after="a").status == 400
    assert turn(api, "x", session, after="f").status == 200
    bad = turn(api, "y", session, "y", replace=True, sampling_params={"temperature": -1})
    assert bad.status == 400 and turn(api, "x", session, after="f").status == 200, "a bad request forgets nothing"


def test_what_does_not_fit(api: Api, session: str) -> None:
    turn(api, "Hello", session, "t1")
    for fields, param in (
        ({"after": "nope"}, "session_params.rid"),
        ({"after": "t1", "offset": 1000}, "session_params.offset"),
        ({"after": "t1", "offset": -2}, "session_params.offset"),
        ({"offset": 3}, "session_params.offset"),
        ({"sampling_params": {"n": 2}}, "session_params"),
        ({"after": "t1", "rid": "t1"}, "rid"),
    ):
        fields = {"rid": "new", **fields}
        refused = turn(api, "x", session, **fields)
        assert refused.status == 400 and refused.error["param"] == param, fields
    many = api.post("/generate", {"text": ["a", "b"], "session_params": {"id": session}})
    assert many.status == 400
    long = turn(api, "word " * 600, session, after="t1")
    assert long.error["code"] == "context_length_exceeded"
    for params in ({}, {"id": 3}, {"id": session, "replace": "yes"}, "x"):
        assert api.post("/generate", {"text": "a", "session_params": params}).status == 400
    assert turn(api, "x", "unheard-of").status == 404


def test_opening_and_closing(api: Api) -> None:
    assert api.post("/open_session", {"session_id": "mine", "capacity_of_str_len": 1000}).json == "mine"
    again = api.post("/open_session", {"session_id": "mine"})
    assert again.status == 409 and again.error["code"] == "session_exists"
    assert api.post("/close_session", {"session_id": "mine"}).json == {"closed": "mine"}
    assert api.engine.closed == ["mine"]
    assert api.post("/close_session", {"session_id": "mine"}).status == 404
    assert turn(api, "x", "mine").status == 404
    for body in (
        {"timeout": -1},
        {"timeout": 1e300},
        {"timeout": "x"},
        {"session_id": "x" * 1000},
        {"streaming": True},
    ):
        assert api.post("/open_session", body).status == 400
    assert api.post("/close_session", {}).status == 400


def test_a_turn_that_fails_is_no_turn(api: Api, session: str) -> None:
    turn(api, "Hello", session, "t1")
    api.engine.trouble = lambda request, said: Fault(500, "model_error", "broken")
    assert turn(api, "x", session, "t2", after="t1").status == 500
    api.engine.trouble = lambda request, said: None
    assert turn(api, "x", session, "t3", after="t2").status == 400
    assert turn(api, "x", session, "t2", after="t1").status == 200, "its name is free again"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_does_no_harm(api: Api, session: str, stream: bool) -> None:
    turn(api, "Hello", session, "t1")
    api.engine.held = True

    async def leave() -> None:
        body = {"text": "x", "rid": "t2", "stream": stream, "session_params": {"id": session, "rid": "t1"}}
        call = api.call("POST", "/generate", body)
        await api.until(lambda: bool(api.engine.running))
        still = await api.ask("POST", "/generate", {"text": "y", "session_params": {"id": session, "rid": "t2"}})
        assert still.status == 400 and "not ended" in still.error["message"]
        await call.disconnect()
        await api.settled()

    api.run(leave())
    api.engine.held = False
    assert turn(api, "x", session, after="t2").status == 400
    assert turn(api, "x", session, "t2", after="t1").status == 200
    assert seen(api) == f"Helloone{END}x"


def test_closing_ends_what_runs(api: Api) -> None:
    name = api.post("/open_session", {}).json
    api.engine.held = True

    async def close() -> Answer:
        call = api.call("POST", "/generate", {"text": "x", "session_params": {"id": name}})
        await api.until(lambda: bool(api.engine.running))
        assert (await api.ask("POST", "/close_session", {"session_id": name})).status == 200
        return await call.end()

    answer = api.run(close())
    assert (
        answer.json["meta_info"]["finish_reason"]["type"] == "abort" if answer.status == 200 else answer.status == 499
    )
    assert not api.hub.in_flight


def test_a_session_ends_when_nobody_speaks(api: Api) -> None:
    async def wait() -> None:
        name = (await api.ask("POST", "/open_session", {"timeout": 0.05})).json
        api.engine.held = True
        call = api.call("POST", "/generate", {"text": "x", "session_params": {"id": name}})
        await asyncio.sleep(0.15)
        assert api.engine.closed == [], "a turn that runs keeps it open"
        api.engine.release()
        assert (await call.end()).status == 200
        await asyncio.sleep(0.15)
        assert api.engine.closed == [name]
        assert (await api.ask("POST", "/close_session", {"session_id": name})).status == 404

    api.run(wait())


class _Hub:
    def abort(self, rid: str, reason: str) -> int:
        return 0

    def end_session(self, name: str) -> None:
        pass


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_tree_of_turns(data: st.DataObject) -> None:
    """Against a model that keeps whole contexts and the names of ancestors."""
    sessions = Sessions(_Hub())  # type: ignore[arg-type]
    name = sessions.open("s", 0.0)
    model: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]] = {}
    for number in range(data.draw(st.integers(1, 12))):
        rid = data.draw(st.sampled_from([None, *model, "none"]))
        replace, drop = data.draw(st.booleans()), data.draw(st.booleans())
        offset = data.draw(st.sampled_from([None, 0, -1, 1, 3, 50]))
        if rid is not None and rid in model:
            prompt, output, above = model[rid]
            context: tuple[int, ...] | None = prompt if drop else prompt + output
            above = (*above, rid)
        else:
            context, above = (), ()
        if rid == "none" or (offset not in (None, 0, -1) and (rid is None or offset > len(context or ()))):
            context = None
        try:
            place: Place | None = sessions.place(name, rid, offset, replace=replace, drop_output=drop)
        except RadixError:
            place = None
        assert (place is None) == (context is None)
        if place is None or context is None:
            continue
        if offset not in (None, 0, -1):
            context = context[:offset]
        assert place.context == context
        if replace:
            gone = {key for key, (_, _, ancestors) in model.items() if rid is None or rid in ancestors}
            model = {key: value for key, value in model.items() if key not in gone}
        new, prompt = f"t{number}", (*place.context, number)
        sessions.begin(place, new)
        kept = data.draw(st.booleans())
        sessions.end(place, new, Turn(place.parent, prompt, (100 + number,)) if kept else None)
        if kept:
            model[new] = (prompt, (100 + number,), above)
    for key in model:
        assert (
            sessions.place(name, key, None, replace=False, drop_output=False).context == model[key][0] + model[key][1]
        )
