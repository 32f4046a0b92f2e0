"""Keys with names: what their file may say, what each scope opens, and what the engine is told of who calls."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixlm.api.keyfile import read_keys
from radixlm.base.errors import StartupError
from radixlm.config.resolve import defaults, from_flat
from radixlm.engine.build import make_scheduler
from support.server import Api, facts

SEARCH, BATCH, OPS, SCRAPER = "sk-search-1", "sk-batch-2", "sk-ops-3", "sk-scraper-4"
FILE = f"""
- {{name: search, key: {SEARCH}, weight: 3}}
- {{name: batch, sha256: {hashlib.sha256(BATCH.encode()).hexdigest().upper()}, private_cache: true}}
- {{name: ops, key: {OPS}, scopes: [infer, admin]}}
- {{name: scraper, key: {SCRAPER}, scopes: [metrics]}}
"""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def api(file: str) -> Iterator[Api]:
    with Api({"server": {"api_key_file": file}}) as api:
        yield api


@pytest.mark.parametrize(
    ("method", "path", "opens"),
    [
        ("GET", "/v1/models", {SEARCH, BATCH, OPS}),
        ("GET", "/docs", {SEARCH, BATCH, OPS}),
        ("GET", "/server_info", {SEARCH, BATCH, OPS}),
        ("GET", "/metrics", {SEARCH, BATCH, OPS, SCRAPER}),
        ("POST", "/flush_cache", {OPS}),
        ("GET", "/health", {SEARCH, BATCH, OPS, SCRAPER, "sk-nobody"}),
    ],
)
def test_scopes(api: Api, method: str, path: str, opens: set[str]) -> None:
    for key in (SEARCH, BATCH, OPS, SCRAPER, "sk-nobody"):
        status = api.run(api.ask(method, path, None, bearer(key))).status
        assert status == (200 if key in opens else 401 if key == "sk-nobody" else 403), key
    assert api.get("/v1/models").status == 401


def test_a_key_of_the_command_line_works_beside_them(file: str) -> None:
    with Api({"server": {"api_key_file": file, "api_key": "sk-plain"}}) as api:
        assert api.get("/v1/models", bearer("sk-plain")).status == 200
        assert api.post("/flush_cache", {}, bearer("sk-plain")).status == 403  # there is a key for control
        assert api.post("/flush_cache", {}, bearer(OPS)).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 2}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        ("/generate", {"text": "Hi", "sampling_params": {"max_new_tokens": 2}}),
        ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        ("/v1/responses", {"model": "tiny", "input": "Hi", "max_output_tokens": 2}),
        ("/v1/responses", {"model": "tiny", "input": "Hi", "max_output_tokens": 2, "background": True}),
        ("/api/generate", {"model": "tiny", "prompt": "Hi", "options": {"num_predict": 2}}),
        ("/v1/embeddings", {"model": "tiny", "input": "Hi"}),
        ("/v1/rerank", {"query": "Hi", "documents": ["a"]}),
    ],
)
def test_the_engine_is_told_the_name_and_never_the_key(api: Api, path: str, body: dict[str, Any]) -> None:
    for key, tenant, share in ((SEARCH, "search", 3.0), (BATCH, "batch", 1.0)):
        api.engine.requests.clear()
        assert api.post(path, body, bearer(key)).status == 200
        api.run(api.settled())
        assert {(request.tenant, request.share) for request in api.engine.requests} == {(tenant, share)}
        assert key not in repr(api.engine.requests)
        private = {request.namespace.startswith("batch\n") for request in api.engine.requests}
        assert private == {tenant == "batch"}


def test_a_private_cache_has_compartments_of_its_own(api: Api) -> None:
    fields = {"model": "tiny", "prompt": "Hi", "max_tokens": 1}
    for key in (BATCH, SEARCH):
        for salt in (None, "salt"):
            api.post("/v1/completions", {**fields, "cache_salt": salt}, bearer(key))
    assert len({request.namespace for request in api.engine.requests}) == 4


def test_a_request_is_aborted_by_its_own_key_or_the_admins(api: Api) -> None:
    async def go() -> None:
        api.engine.held = True
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 9, "rid": "mine"}
        call = api.call("POST", "/v1/completions", body, bearer(SEARCH))
        await api.until(lambda: bool(api.engine.running))
        for key, count in ((BATCH, 0), (SEARCH, 1)):
            answer = await api.ask("POST", "/abort_request", {"rid": "mine"}, bearer(key))
            assert answer.json == {"aborted": count}
        assert (await call.end()).status == 499
        call = api.call("POST", "/v1/completions", body, bearer(SEARCH))
        await api.until(lambda: bool(api.engine.running))
        assert (await api.ask("POST", "/abort_request", {"rid": "mine"}, bearer(OPS))).json == {"aborted": 1}
        assert (await call.end()).status == 499
        assert (await api.ask("POST", "/abort_request", {"abort_all": True}, bearer(SEARCH))).status == 403

    api.run(go())


SECRET = "sk-very-secret-5"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "a list of keys"),
        ("{}", "a list of keys"),
        (f"- {{name: a, key: {SECRET}", "not YAML"),
        (f"- {{key: {SECRET}}}", "name"),
        (f"- {{name: a b, key: {SECRET}}}", "entry 1"),
        ("- {name: a}", "either key or sha256"),
        (f"- {{name: a, key: {SECRET}, sha256: {'a0' * 32}}}", "either key or sha256"),
        (f"- {{name: a, key: '{SECRET} x'}}", "printable"),
        ("- {name: a, sha256: abc}", "64 hexadecimal"),
        (f"- {{name: a, key: {SECRET}, scopes: [root]}}", "entry 1"),
        (f"- {{name: a, key: {SECRET}, scopes: []}}", "no scope"),
        (f"- {{name: a, key: {SECRET}, weight: 0}}", "entry 1"),
        (f"- {{name: a, key: {SECRET}, weight: .nan}}", "entry 1"),
        (f"- {{name: a, key: {SECRET}, wieght: 2}}", "wieght"),
        (f"- {{name: a, key: {SECRET}}}\n- {{name: a, key: x}}", "the name of an earlier"),
        (f"- {{name: a, key: {SECRET}}}\n- {{name: b, key: {SECRET}}}", "the key of an earlier"),
        ("[" * 5000, "not YAML"),
    ],
)
def test_wrong_files_are_named_and_keys_are_not(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    with pytest.raises(StartupError, match=words) as caught:
        read_keys(str(path))
    assert str(path) in caught.value.message
    assert SECRET not in caught.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no such file"):
        read_keys(str(tmp_path / "none.yaml"))


def test_keys_with_names_mean_fair_shares() -> None:
    common = {"chunked_prefill_size": 64, "max_prefill_tokens": 64}
    plain = from_flat({**defaults(), **common})
    named = from_flat({**defaults(), **common, "api_key_file": "keys.yaml"})
    assert not make_scheduler(plain, facts()).settings.fair
    assert make_scheduler(named, facts()).settings.fair
