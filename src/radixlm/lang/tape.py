"""This module owns `Tape`: what a streamed state said, piece by piece, for whoever reads it, whenever they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Piece:
    """News of a state.

    Attributes:
        name: the variable that the text belongs to, "" for text of none.
        meta: what the backend told with it.
        last: the variable is complete.
    """

    name: str
    text: str
    meta: dict[str, Any] = field(default_factory=dict)
    last: bool = False


#: A listener gets pieces, then None, or an error in its place.
News = Piece | BaseException | None
Listener = Callable[[News], None]


class Tape:
    """Lives on the loop."""

    __slots__ = ("_listeners", "_news")

    def __init__(self) -> None:
        self._news: list[News] = []
        self._listeners: list[Listener] = []

    @property
    def ended(self) -> bool:
        return bool(self._news) and not isinstance(self._news[-1], Piece)

    def say(self, news: News) -> None:
        if self.ended:
            return
        self._news.append(news)
        for listener in self._listeners:
            listener(news)

    def listen(self, listener: Listener) -> None:
        """Hand over all that was said and all that will be."""
        for news in self._news:
            listener(news)
        if not self.ended:
            self._listeners.append(listener)
