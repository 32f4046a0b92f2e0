"""This module owns `radixlm chat`: a conversation in the terminal that shows what the prefix cache saves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from radixlm.base.errors import RadixError
from radixlm.cli import asking
from radixlm.cli.screen import Screen
from radixlm.cli.settings import settle
from radixlm.cli.talk import Message, Talker, Turn, ask
from radixlm.config import cli

_HELP: Final = (
    ("/reset", "forget the conversation"),
    ("/system TEXT", "set the system message (empty: the template's own) and forget the conversation"),
    ("/set NAME VALUE", "set a sampling parameter, e.g. /set temperature 0.2"),
    ("/stats", "figures of the whole conversation"),
    ("/help", "this list"),
    ("/bye", "leave (also Ctrl-D)"),
    ('"""', "begin and end a message of several lines"),
    ("Ctrl-C", "stop the answer"),
)
_QUOTES: Final = '"""'


def parser() -> cli.Parser:
    made = cli.Parser(
        "radixlm chat",
        "Chat with a model. Every turn sends the whole conversation again; the prefix cache keeps that cheap, and the "
        "line under each answer shows how much of it was cached. Every engine option of `radixlm serve` is accepted.",
        "radixlm chat [MODEL] [options]",
    )
    made.add_argument("argument", metavar="MODEL", nargs="?", help="the same as --model MODEL")
    asking.add_asking(made)
    return made


def main(argv: Sequence[str]) -> int:
    said = parser().parse(argv)
    resolved = settle(said, said.argument, asking.QUIET)
    if resolved is None:
        return 0
    sampling = asking.sampling(said)
    asking.check_sampling(sampling)
    screen = Screen()
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives `input` line editing and history)
    talker = asking.talker(said, resolved, screen)
    try:
        Conversation(talker, sampling, said.system or "", screen).run(input)
    finally:
        talker.close()
    return 0


class Conversation:
    """The messages so far and the figures of each turn.

    Args:
        sampling: parameters under their native names; `/set` changes them.
    """

    def __init__(self, talker: Talker, sampling: dict[str, Any], system: str, screen: Screen) -> None:
        self._talker = talker
        self._sampling = sampling
        self._screen = screen
        self._system = system
        self.messages: list[Message] = []
        self.turns: list[Turn] = []
        self.reset()

    def run(self, read: Callable[[str], str]) -> None:
        """Talk until `/bye`, the end of the input, or Ctrl-C at the prompt.

        Args:
            read: shows a prompt and returns a line (`input`); `EOFError` ends the conversation.
        """
        self._screen.line(f"{self._talker.name} listens; /help lists the commands, /bye leaves", "dim")
        try:
            while (text := _message(read)) != "/bye":
                if text.startswith("/"):
                    self._command(text)
                elif text:
                    self.say(text)
        except (EOFError, KeyboardInterrupt):
            self._screen.line()

    def say(self, text: str) -> None:
        """One turn. A turn that fails is forgotten, so that the next one can succeed."""
        self.messages.append({"role": "user", "content": text})
        try:
            turn = ask(self._talker, self.messages, self._sampling, self._screen.write, self._screen.think)
        except RadixError as error:
            self.messages.pop()
            self._screen.line(f"error: {error.message}", "red")
            return
        self._screen.line()
        self._screen.line(f"[{turn}]", "dim")
        self.messages.append({"role": "assistant", "content": turn.text})
        self.turns.append(turn)

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        if name == "/reset":
            self.reset()
            self._screen.line("the conversation is forgotten", "dim")
        elif name == "/system":
            self._system = rest
            self.reset()
            self._screen.line("new conversation" + (", new system message" if rest else ", no system message"), "dim")
        elif name == "/set":
            self._set(rest)
        elif name == "/stats":
            self._stats()
        elif name in ("/help", "/?"):
            self._screen.table("commands", _HELP)
        else:
            self._screen.line(f"unknown command {name}; /help lists them", "red")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        name = {"max_tokens": "max_new_tokens"}.get(name.replace("-", "_"), name.replace("-", "_"))
        kinds = asking.kinds()
        if name not in kinds:
            self._screen.line(f"unknown parameter {name!r}; there are {', '.join(kinds)}", "red")
            return
        try:
            self._sampling[name] = kinds[name](value)
        except ValueError:
            self._screen.line(f"{name} cannot be {value!r}: it takes a number", "red")
            return
        self._screen.line(f"{name} = {self._sampling[name]}", "dim")

    def _stats(self) -> None:
        prompt = sum(turn.prompt_tokens for turn in self.turns)
        cached = sum(turn.cached_tokens for turn in self.turns)
        share = f" ({cached / prompt:.0%})" if prompt else ""
        rows = [
            ("turns", str(len(self.turns))),
            ("tokens generated", str(sum(turn.completion_tokens for turn in self.turns))),
            ("prompt tokens", str(prompt)),
            ("of these cached", f"{cached}{share}"),
            ("seconds of waiting", f"{sum(turn.first for turn in self.turns):.2f} for first tokens"),
        ]
        self._screen.table("this conversation", rows)


def _message(read: Callable[[str], str]) -> str:
    """One message: a line, or the lines between triple quotes."""
    line = read(">>> ").strip()
    if not line.startswith(_QUOTES):
        return line
    lines = [line.removeprefix(_QUOTES)]
    while not lines[-1].rstrip().endswith(_QUOTES):
        lines.append(read("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
    # In quotes a leading slash is text, not a command.
    text = "\n".join(lines).strip()
    return f" {text}" if text.startswith("/") else text
