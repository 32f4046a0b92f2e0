"""This module owns `Prompt`: what a state says so far, as a backend is asked to go on with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from radixlm.lang.ir import Image

Part = str | Image


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a chat. `parts` are its texts and pictures, neighbouring texts joined."""

    role: str
    parts: tuple[Part, ...] = ()

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    def plain(self) -> dict[str, Any]:
        """As chat templates and APIs take a message without pictures."""
        return {"role": self.role, "content": self.text}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or a chat. One of both is empty.

    Attributes:
        messages: those that are complete.
        open: the one that is being written, None between messages.
        program: the run that it belongs to, so that a backend can be fair to each of them.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    open: Message | None = None
    program: int = 0

    @property
    def chat(self) -> bool:
        return bool(self.messages) or self.open is not None

    @property
    def pictures(self) -> bool:
        everything = (*self.messages, self.open) if self.open else self.messages
        return any(isinstance(part, Image) for m in everything for part in m.parts)

    def request(self) -> tuple[list[dict[str, Any]], bool]:
        """(messages, whether the last one is to be continued) for a chat template.

        An assistant's message without text is what a template's generation prompt stands for.
        """
        messages = [message.plain() for message in self.messages]
        if self.open is None or (self.open.role == "assistant" and not self.open.parts):
            return messages, False
        return [*messages, self.open.plain()], True


@dataclass(slots=True)
class Content:
    """What one state says: grows, and can be copied. Owned by the state's executor."""

    text: str = ""
    messages: tuple[Message, ...] = ()
    role: str = ""
    parts: list[Part] = field(default_factory=list)

    def copy(self) -> Content:
        return Content(self.text, self.messages, self.role, list(self.parts))

    def append(self, part: Part) -> None:
        if not self.role:
            assert isinstance(part, str), "a picture belongs to a message"
            self.text += part
        elif isinstance(part, str) and self.parts and isinstance(self.parts[-1], str):
            self.parts[-1] += part
        elif part:
            self.parts.append(part)

    def begin(self, role: str) -> None:
        self.role, self.parts = role, []

    def end(self) -> None:
        self.messages = (*self.messages, Message(self.role, tuple(self.parts)))
        self.role, self.parts = "", []

    def begun(self) -> str:
        """The text of the open message so far."""
        return "".join(part for part in self.parts if isinstance(part, str))

    def prompt(self, program: int) -> Prompt:
        opened = Message(self.role, tuple(self.parts)) if self.role else None
        return Prompt(self.text, self.messages, opened, program)
