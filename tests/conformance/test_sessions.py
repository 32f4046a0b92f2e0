"""Sessions against a live server: the next turn finds all of the last one cached; others still get memory."""

from __future__ import annotations

import time
from typing import Any

import pytest

from support.live import Refused, Server, until
from support.words import ids


def turn(server: Server, tokens: list[int], session: str, rid: str, after: str | None = None, **fields: Any) -> Any:
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    params = {"id": session, "rid": after}
    body = {"input_ids": tokens, "rid": rid, "sampling_params": sampling, "session_params": params, **fields}
    return server.ask("/generate", body)


def open_session(server: Server, **fields: Any) -> str:
    response = server.post("/open_session", fields)
    assert response.status_code == 200
    name: str = response.json()
    return name


def test_a_turn_finds_all_of_the_one_before(plain: Server) -> None:
    name = open_session(plain)
    first = turn(plain, ids(300), name, "a")
    second = turn(plain, ids(20, 300), name, "b", "a")
    meta = second["meta_info"]
    assert meta["prompt_tokens"] == 300 + 6 + 20
    assert meta["cached_tokens"] == 300 + 5, "all but the last generated token, whose KV nobody needed"
    whole = plain.ask(
        "/generate",
        {
            "input_ids": [*ids(300), *first["output_ids"], *ids(20, 300)], "cache_salt": "apart",
            "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
        },
    )  # fmt: skip
    assert second["output_ids"] == whole["output_ids"]
    branch = turn(plain, ids(5, 400), name, "c", "a")
    assert branch["meta_info"]["cached_tokens"] == 306, "the second turn computed the last one too"
    assert plain.figures()["pool_pinned"] > 0
    plain.ask("/close_session", {"session_id": name})
    until(lambda: plain.figures()["pool_pinned"] == 0)


def test_others_get_what_a_session_holds(scarce: Server) -> None:
    """What a session holds of a small pool outlives others that fit beside it, and makes way for more."""
    name = open_session(scarce)
    turn(scarce, ids(400), name, "a")
    for start in (0, 300):  # these evict each other, not the session
        scarce.ask("/generate", {"input_ids": ids(400, 1000 + start), "sampling_params": {"max_new_tokens": 2}})
    assert turn(scarce, ids(4, 500), name, "b", "a")["meta_info"]["cached_tokens"] == 405
    big = scarce.ask("/generate", {"input_ids": ids(900, 2000), "sampling_params": {"max_new_tokens": 4}})
    assert big["meta_info"]["completion_tokens"] > 0, "a request that needs the whole pool gets it"
    after = turn(scarce, ids(4, 600), name, "c", "b")
    assert after["meta_info"]["prompt_tokens"] == 400 + 6 + 4 + 6 + 4 and after["meta_info"]["cached_tokens"] < 405
    scarce.ask("/close_session", {"session_id": name})


def test_time_outs(plain: Server) -> None:
    name = open_session(plain, timeout=0.3)
    turn(plain, ids(50, 700), name, "a")
    time.sleep(1.0)
    until(lambda: plain.figures()["pool_pinned"] == 0)
    with pytest.raises(Refused) as refused:
        turn(plain, ids(5), name, "b", "a")
    assert refused.value.status == 404 and refused.value.error["code"] == "session_not_found"
