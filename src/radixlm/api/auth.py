"""This module owns who may call what: one layer around the whole app. A route is closed unless it is listed here."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from radixlm.api import errors
from radixlm.api.caller import ANYBODY, Caller
from radixlm.api.errors import route_path
from radixlm.base.errors import Forbidden, RadixError, Unauthorized

#: Open to everyone: what load balancers and orchestrators call. Nothing here does work or tells anything of the model.
PUBLIC = frozenset({"/health", "/healthz", "/live", "/ready", "/ping"})

#: The routes that ask for another scope than `infer`.
SCOPES = {"/flush_cache": "admin", "/metrics": "metrics"}

#: Scope -> what it opens.
OPENS = {
    "infer": frozenset({"infer", "metrics"}),
    "admin": frozenset({"infer", "admin", "metrics"}),
    "metrics": frozenset({"metrics"}),
}


@dataclass(frozen=True, slots=True)
class Key:
    """
    Attributes:
        name: "" for a key that has none.
        digest: of the key, SHA-256. The key itself is not kept.
        scopes: what it opens, of `OPENS`.
        weight, private_cache: see `Caller`.
    """

    name: str
    digest: bytes
    scopes: frozenset[str]
    weight: float = 1.0
    private_cache: bool = False

    def opens(self, scope: str) -> bool:
        return any(scope in OPENS[own] for own in self.scopes)


class Keys:
    """The keys of a server. Comparisons take the same time whatever is offered.

    Args:
        api_key, admin_key: those without a name.
        named: those of `--api-key-file`.
    """

    def __init__(self, api_key: str | None, admin_key: str | None, named: Iterable[Key] = ()) -> None:
        keys = list(named)
        self._closed = api_key is not None or bool(keys)
        if admin_key:
            keys.append(Key("", digest_of(admin_key), frozenset({"admin"})))
        if api_key:
            # Without any key for control this one has to do.
            alone = not any(key.opens("admin") for key in keys)
            keys.append(Key("", digest_of(api_key), frozenset({"infer", "admin"} if alone else {"infer"})))
        self._keys = tuple(keys)

    def is_admin(self, offered: str | None) -> bool:
        """Whether control routes are open to the bearer. Where there is no key at all, they are open to everyone."""
        return self.caller(offered).admin

    def caller(self, offered: str | None) -> Caller:
        """Who the bearer is. Whether they may call at all, `refusal` says."""
        if not self._keys:
            return Caller(admin=True)
        key = self._find(offered)
        return ANYBODY if key is None else Caller(key.name, key.weight, key.opens("admin"), key.private_cache)

    def refusal(self, path: str, offered: str | None) -> RadixError | None:
        """Why the bearer of `offered` may not call `path`, or None."""
        scope = SCOPES.get(path, "infer")
        if path in PUBLIC or not self._keys or (scope != "admin" and not self._closed):
            return None
        key = self._find(offered)
        if key is None:
            return _unauthorized(offered)
        if key.opens(scope):
            return None
        if scope == "admin":
            return Forbidden("this route needs the admin key (--admin-api-key, or a key with the scope admin)")
        return Forbidden(f"this key has not the scope {scope}, which this route needs")

    def _find(self, offered: str | None) -> Key | None:
        """Compares digests, always with every key: neither the length of a key shows nor which one came close."""
        if offered is None:
            return None
        digest = hashlib.sha256(offered.encode("latin-1")).digest()  # header text is latin-1: the client's bytes
        found = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _unauthorized(offered: str | None) -> Unauthorized:
    if offered is None:
        return Unauthorized("this route needs a key: send the header Authorization: Bearer KEY (or x-api-key: KEY)")
    return Unauthorized("the API key is wrong")


def bearer(headers: Headers) -> str | None:
    """The key of an `Authorization: Bearer` header, the scheme in any case, else that of `x-api-key`, which Anthropic's
    clients send. None without one.
    """
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip(" ") if scheme.lower() == "bearer" else headers.get("x-api-key")


class Auth:
    """ASGI layer that answers 401 or 403 before anything else looks at a request, and notes who calls."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            offered = bearer(Headers(scope=scope))
            refusal = self._keys.refusal(route_path(scope), offered)
            if refusal is not None:
                await errors.response(refusal, scope)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = self._keys.caller(offered)
        elif scope["type"] != "lifespan":
            await send({"type": "websocket.close", "code": 1008})  # no route speaks anything but HTTP
            return
        await self._app(scope, receive, send)
