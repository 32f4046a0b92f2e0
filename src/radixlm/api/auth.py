"""This module owns who may call what: one layer around the whole app. A route is closed unless it is listed here."""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from radixlm.api import errors
from radixlm.api.errors import route_path
from radixlm.base.errors import Forbidden, RadixError, Unauthorized

#: Open to everyone: what load balancers and orchestrators call. Nothing here does work or tells anything of the model.
PUBLIC = frozenset({"/health", "/healthz", "/live", "/ready", "/ping"})

#: Need the admin key, where one is set.
ADMIN = frozenset({"/flush_cache"})


class Keys:
    """The keys of a server. Comparisons take the same time whatever is offered."""

    def __init__(self, api_key: str | None, admin_key: str | None) -> None:
        self._api = _digest(api_key.encode()) if api_key else None
        self._admin = _digest(admin_key.encode()) if admin_key else None

    @property
    def separate_admin(self) -> bool:
        return self._admin is not None

    def is_admin(self, offered: str | None) -> bool:
        """Whether control routes are open to the bearer. Without an admin key the API key is enough; without both,
        everyone is.
        """
        if self._admin is not None:
            return _same(offered, self._admin)
        return self._api is None or _same(offered, self._api)

    def refusal(self, path: str, offered: str | None) -> RadixError | None:
        """Why the bearer of `offered` may not call `path`, or None."""
        if path in PUBLIC:
            return None
        if path in ADMIN:
            if self.is_admin(offered):
                return None
            if self._api is not None and self._admin is not None and _same(offered, self._api):
                return Forbidden("this route needs the admin key (--admin-api-key)")
            return _unauthorized(offered)
        if self._api is None or _same(offered, self._api) or (self._admin is not None and _same(offered, self._admin)):
            return None
        return _unauthorized(offered)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _same(offered: str | None, digest: bytes) -> bool:
    """Compares digests: not even the length of the key shows. Header text is latin-1, so its bytes are the client's."""
    return offered is not None and hmac.compare_digest(_digest(offered.encode("latin-1")), digest)


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
    """ASGI layer that answers 401 or 403 before anything else looks at a request."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            refusal = self._keys.refusal(route_path(scope), bearer(Headers(scope=scope)))
            if refusal is not None:
                await errors.response(refusal, scope)(scope, receive, send)
                return
        elif scope["type"] != "lifespan":
            await send({"type": "websocket.close", "code": 1008})  # no route speaks anything but HTTP
            return
        await self._app(scope, receive, send)
