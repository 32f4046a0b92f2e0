"""Who may call what, on every route there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.routing import Route

from radixlm.api.app import routes
from radixlm.api.auth import PUBLIC, Keys
from radixlm.api.service import Service
from support.server import Api

KEY, ADMIN = "the-key", "the-admin-key"


def bearer(key: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"authorization": f"{scheme} {key}"}


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with Api({"server": {"api_key": KEY}}) as api:
        yield api


@pytest.fixture(scope="module")
def two_keys() -> Iterator[Api]:
    with Api({"server": {"api_key": KEY, "admin_api_key": ADMIN}}) as api:
        yield api


def table(api: Api) -> list[Route]:
    return routes(Service(api.hub, api.served, api.config), Keys(None, None), api.metrics)


def test_every_route_but_the_public_ones_asks_for_the_key(api: Api) -> None:
    walked = 0
    for route in table(api):
        path = re.sub(r"\{.*\}", "tiny", route.path)
        for method in route.methods or ():
            answer = api.run(api.ask(method, path))
            assert (answer.status == 200) == (route.path in PUBLIC), (method, path)
            if route.path not in PUBLIC:
                assert answer.status == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert answer.error["type"] in ("authentication_error", None)
            walked += 1
    assert walked > 30
    for unknown in (
        "/docs",
        "/openapi.json",
        "/invocations",
        "/health/",
        "//health",
        "/health/../v1/models",
        "/HEALTH",
    ):
        assert api.get(unknown).status == 401, unknown


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_right_key(api: Api, scheme: str) -> None:
    assert api.get("/v1/models", bearer(KEY, scheme)).status == 200


@pytest.mark.parametrize(
    "header",
    [bearer("x"), bearer(""), bearer(KEY + " x"), bearer(KEY[:4]), bearer(KEY, "Basic"), {"authorization": KEY},
     {"x-api-key": "x"}, {"x-api-key": KEY, **bearer("x")}, bearer("ключ".encode().decode("latin-1"))],
)  # fmt: skip
def test_wrong_key(api: Api, header: dict[str, str]) -> None:
    answer = api.get("/v1/models", header)
    assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
    assert KEY not in answer.body.decode()


def test_the_header_of_anthropics_clients(api: Api) -> None:
    assert api.get("/v1/models", {"x-api-key": KEY}).status == 200


def test_a_key_in_the_query_is_no_key(api: Api) -> None:
    assert api.get(f"/v1/models?api_key={KEY}").status == 401


def test_without_an_admin_key_the_api_key_is_enough(api: Api) -> None:
    assert api.post("/flush_cache", {}, bearer(KEY)).status == 200
    assert api.post("/abort_request", {"abort_all": True}, bearer(KEY)).json == {"aborted": 0}


def test_control_needs_the_admin_key_where_there_is_one(two_keys: Api) -> None:
    api = two_keys
    assert api.post("/flush_cache", {}).status == 401
    refused = api.post("/flush_cache", {}, bearer(KEY))
    assert refused.status == 403 and refused.error["type"] == "permission_error"
    assert api.post("/flush_cache", {}, bearer(ADMIN)).json == {"success": True, "flushed_tokens": 7}
    # one's own request may be aborted with the key it was made with
    assert api.post("/abort_request", {"rid": "r"}, bearer(KEY)).status == 200
    assert api.post("/abort_request", {"abort_all": True}, bearer(KEY)).status == 403
    assert api.post("/abort_request", {"abort_all": True}, bearer(ADMIN)).status == 200
    assert api.get("/v1/models", bearer(ADMIN)).status == 200


def test_an_admin_key_alone_closes_control_only() -> None:
    with Api({"server": {"admin_api_key": ADMIN}}) as api:
        assert api.get("/v1/models").status == 200
        assert api.post("/flush_cache", {}).status == 401
        assert api.post("/abort_request", {"abort_all": True}).status == 403


def test_websockets_are_turned_away(api: Api) -> None:
    sent: list[dict[str, Any]] = []

    async def go() -> None:
        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect"}

        await api.app({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)

    api.run(go())
    assert [m["type"] for m in sent] == ["websocket.close"]


def test_secrets_are_not_shown(two_keys: Api) -> None:
    body = two_keys.get("/server_info", bearer(KEY)).body.decode()
    assert KEY not in body.replace("api_key", "") and ADMIN not in body


def test_keys_under_a_path_prefix() -> None:
    with Api({"server": {"api_key": KEY}}) as api:

        async def get(path: str) -> int:
            call = api.call("GET", path, root="/llm")
            return (await call.end()).status

        assert api.run(get("/llm/health")) == 200
        assert api.run(get("/llm/v1/models")) == 401
        assert api.run(get("/llm")) == 401


# ---- cross-origin


def test_no_cross_origin_headers_by_default(api: Api) -> None:
    answer = api.get("/v1/models", {"origin": "http://evil.example", **bearer(KEY)})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_allowed_origins_are_echoed_and_others_are_not() -> None:
    good, bad = "https://app.example", "http://evil.example"
    with Api({"server": {"allowed_origins": f"{good}, https://b.example", "api_key": KEY}}) as api:
        allowed = api.get("/v1/models", {"origin": good, **bearer(KEY)})
        assert allowed.headers["access-control-allow-origin"] == good
        assert "x-request-id" in allowed.headers["access-control-expose-headers"].lower()
        assert "access-control-allow-origin" not in api.get("/v1/models", {"origin": bad, **bearer(KEY)}).headers
        preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        asked = api.run(api.ask("OPTIONS", "/v1/chat/completions", None, {"origin": good, **preflight}))
        assert asked.status == 200 and asked.headers["access-control-allow-origin"] == good
        assert "access-control-allow-credentials" not in asked.headers
        # a refusal must be readable by the page that is allowed to call
        assert api.get("/v1/models", {"origin": good}).headers["access-control-allow-origin"] == good
