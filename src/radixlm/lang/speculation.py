"""This module owns the text that is generated ahead: one long completion from which several `gen` are served, for
backends where every call costs its whole prompt again.

After the call, constant text of the program has to agree with what was generated, and each `gen` takes what comes
before its stop string. Where they part, the rest is dropped and the next `gen` makes a call of its own. (Zheng et al.,
SGLang, 2024, section 5: API speculative execution.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from radixlm.lang.errors import ProgramError
from radixlm.lang.ir import Gen
from radixlm.lang.params import GRAMMARS, Params

if TYPE_CHECKING:
    from radixlm.lang.interp import Executor

#: Calls that are made for a message whose beginning the program dictates, where the backend cannot be handed it.
TRIES = 3


class Ahead:
    """The part of a completion that is not used yet.

    Args:
        tokens: of a completion made ahead.
    """

    __slots__ = ("_ended", "_meta", "_params", "_text", "_tokens")

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._text: str | None = None
        self._ended = False  # the model ended there, so nothing comes behind the text
        self._meta: dict[str, Any] = {}
        self._params = Params()

    def drop(self) -> None:
        self._text = None

    def meet(self, text: str) -> None:
        """The program appends constant text."""
        if self._text is not None:
            self._text = self._text[len(text) :] if self._text.startswith(text) else None

    async def take(self, executor: Executor, node: Gen, params: Params) -> tuple[str, dict[str, Any]]:
        """The text of a `gen`, and what the backend told with it."""
        if params.return_logprob or any(getattr(params, name) for name in GRAMMARS):
            return await self._own(executor, params)
        plain = _plain(params)
        if self._text is None or plain != self._params:
            await self._make(executor, plain)
        assert self._text is not None
        places = [place for stop in params.stops() if (place := self._text.find(stop)) >= 0]
        if places:
            text, self._text = self._text[: min(places)], self._text[min(places) :]
        elif self._ended or not _continues(executor):
            text, self._text = self._text, ""
        else:
            return await self._own(executor, params)
        meta, self._meta = self._meta, {"ahead": True}
        return text, meta

    async def _own(self, executor: Executor, params: Params) -> tuple[str, dict[str, Any]]:
        self.drop()
        answer = (await executor.call(params))[0]
        return answer.text, answer.meta

    async def _make(self, executor: Executor, plain: Params) -> None:
        """Generate ahead of where the state is."""
        self._params = plain
        params = msgspec.structs.replace(plain, max_new_tokens=self._tokens)
        begun = "" if _continues(executor) else executor.content.begun()
        text = ""
        for _ in range(TRIES if begun else 1):
            answer = (await executor.call(params, from_start=bool(begun)))[0]
            text, self._meta = answer.text, answer.meta
            if text.startswith(begun):
                self._text = text[len(begun) :]
                self._ended = answer.meta.get("finish_reason", {}).get("type") == "stop"
                return
        raise ProgramError(
            f"{executor.run.backend.name} cannot be handed the beginning of a message, so the model has to write it by "
            f"itself: {begun[:80]!r} was expected, and after {TRIES} calls it began with {text[:80]!r}. Show the "
            "format in the messages before"
        )


def _continues(executor: Executor) -> bool:
    return not executor.content.role or "continue" in executor.run.backend.can


def _plain(params: Params) -> Params:
    """What has to be the same for two `gen` to be served by one completion."""
    return msgspec.structs.replace(params, stop=None, max_new_tokens=None)
