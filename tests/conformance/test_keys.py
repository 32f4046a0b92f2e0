"""AUTH, CORS and SEC-4: who may call what, and what never shows in a reply or in the log."""

from __future__ import annotations

import re
import socket

import pytest

from support.live import Server, check_error
from support.servers import ADMIN_KEY, KEY
from support.words import CTX

OPEN = {"/health", "/healthz", "/live", "/ready", "/ping"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def routes(server: Server) -> list[str]:
    listed: list[str] = server.get("/").json()["routes"]
    assert len(listed) > 20
    return listed


def test_auth_1_every_door_needs_the_key(keyed: Server) -> None:
    """Every route of the table and some that other servers have, with every method, without a key."""
    known = {re.sub(r"\{.*\}", "x", path) for path in routes(keyed)}
    assert {"/generate", "/v1/completions", "/tokenize", "/flush_cache", "/abort_request", "/metrics"} <= known
    others = {"/docs", "/openapi.json", "/invocations", "/v1/load_lora_adapter", "/nope", "//health", "/health/", ""}
    for path in sorted(known | others):
        for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            response = keyed.http.request(method, path, headers={"Authorization": ""})
            if path in OPEN:
                assert response.status_code == (200 if method in ("GET", "HEAD") else 405), (method, path)
            else:
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"].startswith("Bearer")
                if method != "HEAD":
                    check_error(response)


def test_auth_1_the_open_routes_tell_nothing(keyed: Server) -> None:
    for path in sorted(OPEN):
        response = keyed.http.get(path, headers={"Authorization": ""})
        assert response.json() == {"status": "ok"}


def test_auth_1_control_needs_the_admin_key(keyed: Server) -> None:
    response = keyed.http.post("/flush_cache", headers=bearer(KEY))
    assert response.status_code == 403
    check_error(response)
    assert keyed.http.post("/flush_cache", headers=bearer(ADMIN_KEY)).status_code == 200
    response = keyed.http.post("/abort_request", json={"abort_all": True}, headers=bearer(KEY))
    assert response.status_code == 403
    assert keyed.http.post("/abort_request", json={"rid": "x"}, headers=bearer(KEY)).status_code == 200


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER {KEY}"])
def test_auth_2_right_keys(keyed: Server, header: str) -> None:
    assert keyed.http.get("/v1/models", headers={"Authorization": header}).status_code == 200


@pytest.mark.parametrize(
    "header",
    ["Bearer x", "Bearer", f"Bearer {KEY} x", f"Bearer {KEY}x", f"Bearer {KEY[: len(KEY) // 2]}",
     f"Basic {KEY}", KEY, f"Token {KEY}", "Bearer \xff\xfe"],
)  # fmt: skip
def test_auth_2_wrong_keys(keyed: Server, header: str) -> None:
    response = keyed.http.get("/v1/models", headers={b"Authorization": header.encode("latin-1")})
    assert response.status_code == 401
    check_error(response)
    assert KEY not in response.text


@pytest.mark.parametrize("header", ["Bearer ", "Bearer  ", " Bearer", ""])
def test_auth_2_blank_keys(keyed: Server, header: str) -> None:
    """As bytes on the wire: the client library would not send them."""
    with socket.create_connection(("127.0.0.1", keyed.port), timeout=10) as connection:
        request = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: {header}\r\n\r\n"
        connection.sendall(request.encode())
        assert b" 401 " in connection.makefile("rb").readline()


def test_auth_2_a_key_in_the_address_is_no_key(keyed: Server) -> None:
    for name in ("api_key", "key", "token"):
        response = keyed.http.get("/v1/models", params={name: KEY}, headers={"Authorization": ""})
        assert response.status_code == 401


def test_cors_1_no_headers_by_default(plain: Server) -> None:
    response = plain.get("/v1/models", headers={"Origin": "http://evil.example"})
    assert response.status_code == 200
    assert not [name for name in response.headers if name.lower().startswith("access-control")]


def test_cors_1_a_page_cannot_post_in_secret(plain: Server) -> None:
    """What a browser sends across origins without asking is not taken for JSON."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {"Origin": "http://evil.example", **({"Content-Type": kind} if kind else {})}
        response = plain.http.post("/generate", content=b'{"text": "Hi"}', headers=headers)
        assert response.status_code == 415


def test_cors_1_allowed_origins_are_echoed_and_others_are_not(keyed: Server) -> None:
    for origin in ("https://friend.example", "http://localhost:5173"):
        response = keyed.get("/v1/models", headers={"Origin": origin})
        assert response.headers["access-control-allow-origin"] == origin
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        response = keyed.http.options("/v1/models", headers={**asked, "Authorization": ""})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == origin
    for origin in ("http://evil.example", "https://friend.example.evil.example", "null", "http://friend.example"):
        response = keyed.get("/v1/models", headers={"Origin": origin})
        assert "access-control-allow-origin" not in response.headers


def test_sec_4_logs_and_errors_keep_secrets(keyed: Server) -> None:
    mark = "SECRETMARK7193"
    url = f"data:image/png;base64,AAAA{mark}"
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    bad = (
        ("/v1/chat/completions", {"messages": [message]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": {mark: 1}}]}),
        ("/v1/completions", {"prompt": mark * 2000, "max_tokens": CTX}),
        ("/v1/completions", {"prompt": "Hi", "regex": f"{mark}("}),
        ("/v1/completions", {"prompt": [5, mark]}),
        ("/generate", {"text": mark, "sampling_params": {"max_new_tokens": -1}}),
    )
    for path, body in bad:
        error = keyed.refused(path, {"model": keyed.model, **body})
        assert mark not in error["message"]
    keyed.http.get("/v1/models", headers=bearer(f"wrong-{mark}"))
    keyed.complete(prompt=f"{mark} is a secret", max_tokens=2)
    log = keyed.log()
    assert mark not in log
    for key in (KEY, ADMIN_KEY):
        assert key not in log
        assert key not in keyed.get("/server_info").text
        for process in keyed.processes()[1:]:
            assert key not in " ".join(process.cmdline())
