"""The servers that the cases are replayed against: one for each set of arguments, shared by all that a worker runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from support import tiny
from support.live import Server

#: A key for the server that asks for one, and one more for its control routes.
KEY, ADMIN_KEY = "sk-test-7Qm2xW", "sk-admin-9Kd4pZ"

#: Of the server in pages.
PAGE, CHUNK = 16, 64

#: Tokens in the pool of the server whose pool is smaller than its model's context.
SCARCE_POOL = 930

#: Of the server with few rows and small chunks.
ROWS = 4

POOL = ("--max-total-tokens", "32768")


def _plain(models: Path) -> Server:
    return Server(tiny.random_model(models / "plain"), *POOL)


def _repeater(models: Path) -> Server:
    return Server(tiny.repeater(models / "repeater"), *POOL)


def _caller(models: Path) -> Server:
    formats = ("--tool-call-parser", "hermes", "--reasoning-parser", "think")
    return Server(tiny.repeater(models / "caller"), *POOL, *formats)


def _paged(models: Path) -> Server:
    sizes = ("--page-size", str(PAGE), "--chunked-prefill-size", str(CHUNK), "--max-prefill-tokens", str(2 * CHUNK))
    return Server(tiny.random_model(models / "paged"), *POOL, *sizes, name="org/tiny")


def _scarce(models: Path) -> Server:
    sizes = ("--max-total-tokens", str(SCARCE_POOL), "--max-running-requests", "16")
    return Server(tiny.random_model(models / "scarce"), *sizes)


def _narrow(models: Path) -> Server:
    sizes = ("--max-running-requests", str(ROWS), "--chunked-prefill-size", "8", "--max-prefill-tokens", "8")
    return Server(tiny.random_model(models / "narrow"), *POOL, *sizes)


def _keyed(models: Path) -> Server:
    origin = ("--allowed-origins", "https://friend.example,http://localhost:5173")
    keys = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY)
    return Server(tiny.random_model(models / "keyed"), *POOL, *keys, *origin, key=ADMIN_KEY)


def _odd(models: Path) -> Server:
    return Server(tiny.odd(models / "odd"), *POOL)


def _thinker(models: Path) -> Server:
    return Server(tiny.thinker(models / "thinker"), *POOL)


def _real(models: Path) -> Server:
    return Server("smollm2", "--dtype", "float32", "--max-total-tokens", "16384", name="smollm2")


def _embedder(models: Path) -> Server:
    return Server("all-minilm-l6-v2", name="all-minilm-l6-v2", generates=False)


SERVERS: Mapping[str, Callable[[Path], Server]] = {
    "plain": _plain,
    "repeater": _repeater,
    "caller": _caller,
    "paged": _paged,
    "scarce": _scarce,
    "narrow": _narrow,
    "keyed": _keyed,
    "odd": _odd,
    "thinker": _thinker,
    "real": _real,
    "embedder": _embedder,
}


class Servers:
    """Servers by name, started when they are first asked for. One that cannot start is not tried again."""

    def __init__(self, models: Path) -> None:
        self._models = models
        self._running: dict[str, Server] = {}
        self._failed: dict[str, BaseException] = {}

    def lend(self, name: str) -> Iterator[Server]:
        """A fixture: the server for one test, which must leave it as well as it was."""
        if name in self._failed:
            raise self._failed[name]
        if name not in self._running:
            try:
                self._running[name] = SERVERS[name](self._models)
            except BaseException as error:
                self._failed[name] = error
                raise
        server = self._running[name]
        yield server
        server.check_well()

    def stop(self) -> None:
        """End them all, and then complain about those that did not end well."""
        complaints = []
        for name, server in self._running.items():
            try:
                server.stop()
            except AssertionError as error:
                server.kill()
                complaints.append(f"{name}: {error}")
        assert not complaints, "\n".join(complaints)
