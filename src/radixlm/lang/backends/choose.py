"""This module owns the step from whatever names a backend to the backend."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from radixlm.lang.backends.base import Backend
from radixlm.lang.backends.engine import EngineTransport
from radixlm.lang.backends.native import Native
from radixlm.lang.errors import ProgramError


def as_backend(given: Any) -> Backend:
    """A backend as it is; that of an `Engine`; that of a server by its URL.

    Raises:
        ProgramError: it is none of these.
    """
    if isinstance(given, Backend):
        return given
    if isinstance(given, str):
        return _of_url(given)
    if callable(getattr(given, "async_generate", None)):
        return _engines().setdefault(given, Native(EngineTransport(given)))
    raise ProgramError(f"a backend is an Engine, the URL of a server, or a backend of radixlm.lang, not {given!r}")


@lru_cache(maxsize=64)
def _of_url(url: str) -> Backend:
    from radixlm.lang.backends.server import RuntimeEndpoint

    return RuntimeEndpoint(url)


@lru_cache(maxsize=1)
def _engines() -> WeakKeyDictionary[Any, Backend]:
    """One backend for an engine, so that all programs on it share its gate, for as long as the engine lives."""
    return WeakKeyDictionary()
