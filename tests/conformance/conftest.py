"""The servers of `support.servers` as fixtures: each test gets one, and leaves it as well as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.live import Server
from support.servers import SERVERS, Servers


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one server go to one worker (`--dist loadgroup`), so that it is started once."""
    for item in items:
        for name in SERVERS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(name))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    running = Servers(tmp_path_factory.mktemp("models"))
    yield running
    running.stop()


@pytest.fixture
def plain(servers: Servers) -> Iterator[Server]:
    """A random model, everything else as it comes."""
    yield from servers.lend("plain")


@pytest.fixture
def repeater(servers: Servers) -> Iterator[Server]:
    """A model that says its prompt again: any text can be had from it."""
    yield from servers.lend("repeater")


@pytest.fixture
def caller(servers: Servers) -> Iterator[Server]:
    """A repeater whose texts are looked through for calls and reasoning."""
    yield from servers.lend("caller")


@pytest.fixture
def paged(servers: Servers) -> Iterator[Server]:
    """Pages of `PAGE` tokens, chunks of `CHUNK`."""
    yield from servers.lend("paged")


@pytest.fixture
def scarce(servers: Servers) -> Iterator[Server]:
    """A KV pool smaller than the context."""
    yield from servers.lend("scarce")


@pytest.fixture
def narrow(servers: Servers) -> Iterator[Server]:
    """`ROWS` requests at once, and prompts that take many steps."""
    yield from servers.lend("narrow")


@pytest.fixture
def keyed(servers: Servers) -> Iterator[Server]:
    """A server that asks for a key, and for another one on control routes. The client has the latter."""
    yield from servers.lend("keyed")


@pytest.fixture
def odd(servers: Servers) -> Iterator[Server]:
    """A model with every oddity that a checkpoint may have (`tiny.odd`)."""
    yield from servers.lend("odd")


@pytest.fixture
def real(servers: Servers) -> Iterator[Server]:
    """The default model, in float32."""
    yield from servers.lend("real")


@pytest.fixture
def thinker(servers: Servers) -> Iterator[Server]:
    """A random model that reasons, as its template has it."""
    yield from servers.lend("thinker")


@pytest.fixture
def embedder(servers: Servers) -> Iterator[Server]:
    """A real encoder that makes vectors."""
    yield from servers.lend("embedder")
