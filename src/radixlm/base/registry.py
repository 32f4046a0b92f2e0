"""This module owns `Registry`: name -> lazy import path plus capabilities, and selection that explains itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from radixlm.base.errors import StartupError

C = TypeVar("C")  # a frozen capabilities dataclass


@dataclass(frozen=True, slots=True)
class Entry(Generic[C]):
    """A plug-in that is known but not imported. `target` is `package.module:attribute`."""

    name: str
    target: str
    capabilities: C

    def load(self) -> Any:
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True, slots=True)
class Choice:
    """A selection and why: `rejected` maps each better-ranked name to the reason it was passed over."""

    name: str
    reason: str
    rejected: Mapping[str, str]


class Registry(Generic[C]):
    """Plug-ins of one kind, in order of preference."""

    def __init__(self, kind: str, entries: tuple[Entry[C], ...]) -> None:
        self.kind = kind
        self._entries = {entry.name: entry for entry in entries}

    def __iter__(self) -> Iterator[Entry[C]]:
        return iter(self._entries.values())

    def names(self) -> list[str]:
        return list(self._entries)

    def get(self, name: str) -> Entry[C]:
        if name not in self._entries:
            raise StartupError(f"unknown {self.kind} {name!r}; known: {', '.join(self._entries)}")
        return self._entries[name]

    def select(self, wanted: str, objection: Callable[[Entry[C]], str | None]) -> Choice:
        """Choose an entry. `wanted` is a name or `auto`; `objection` returns why an entry cannot serve, or None.

        Raises:
            StartupError: the named entry cannot serve (the nearest that can is in the message), or none can.
        """
        reasons = {entry.name: objection(entry) for entry in self}
        able = [name for name, reason in reasons.items() if reason is None]
        if wanted != "auto":
            reason = reasons[self.get(wanted).name]
            if reason is None:
                return Choice(wanted, "asked for", {})
            hint = f"; use {able[0]!r}" if able else ""
            raise StartupError(f"{self.kind} {wanted!r} cannot be used here: {reason}{hint}")
        if not able:
            listing = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise StartupError(f"no {self.kind} can be used here: {listing}")
        passed = {name: reason for name, reason in reasons.items() if reason is not None}
        ahead = {n: r for n, r in passed.items() if list(reasons).index(n) < list(reasons).index(able[0])}
        reason = "first choice" if not ahead else "; ".join(f"{name}: {why}" for name, why in ahead.items())
        return Choice(able[0], reason, ahead)
