"""This module owns `ChatTemplate`: messages in, the text that the model was trained to see out."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from radixlm.base.errors import BadRequest, StartupError
from radixlm.checkpoint.checkpoint import Checkpoint
from radixlm.checkpoint.directory import read_text
from radixlm.text.messages import Message, map_strings, normalise
from radixlm.text.sandbox import TemplateLimit, compile_template, run
from radixlm.text.tokenizer import Piece
from radixlm.text.words import alternation

#: More control words than this in one request are refused: nobody types them, and each costs.
MAX_CONTROL_WORDS = 10_000

_log = logging.getLogger(__name__)

#: Names that the server itself gives to a template or to the call that renders it.
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)

#: A call that shows whether a template can write arguments that are an object. Nine characters: some templates insist.
_PROBE_ID, _PROBE_KEY = "abcdefghi", "radixlm"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as text, cut where a user typed a control word: those pieces are not trusted."""

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class ChatTemplate:
    """A model's chat template, compiled. Rendering is pure and may run in any thread.

    Attributes:
        sources: the text of the template, or of all of them.
        source: the text of the template (of the one for plain chats, if there are several).
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        variables: Mapping[str, str] | None = None,
        control_words: Iterable[str] = (),
        timeout: float = 5.0,
    ) -> None:
        """Compile.

        Args:
            source: a template, or several by name: `tool_use` is taken for chats with tools, else `default`.
            variables: special tokens by role (`bos_token`, ...), which the template may write.
            control_words: words that are control tokens, unless a user typed them.
            timeout: seconds that rendering may take.

        Raises:
            StartupError: the template is not valid Jinja; the message has the line.
        """
        sources = {"default": source} if isinstance(source, str) else dict(source)
        self.sources = "\n".join(sources.values())
        self._forms = {name: _Form(text) for name, text in sources.items()}
        self.source = sources.get("default") or next(iter(sources.values()))
        self._variables = dict(variables or {})
        self._timeout = timeout
        self._control = alternation(control_words)

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The chat as text.

        Args:
            messages: in OpenAI's form; see `text.messages`.
            add_generation_prompt: end with the start of an assistant's turn; by default unless continuing.
            continue_final_message: end within the last message, so that the model goes on with it.
            extra: further variables (`chat_template_kwargs`).

        Raises:
            BadRequest: the messages are wrong, or the template refuses them (with its words), fails, or takes too long.
        """
        form = self._form(bool(tools))
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        generate = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        hidden = _Hidden(self._control)
        try:
            shaped = normalise(messages, parse_arguments=form.takes_objects, knows_developer=form.knows_developer)
            variables = {
                **self._variables,
                **hidden.hide(_checked(extra or {})),
                "messages": hidden.hide(shaped),
                "tools": hidden.hide(tools) or None,
                "documents": hidden.hide(documents) or None,
                "add_generation_prompt": generate,
            }
            if continue_final_message:
                variables["messages"][-1]["content"] += hidden.mark
            text = _run(form.compiled, variables, self._timeout)
        except RecursionError:
            raise BadRequest("the messages or tools are nested too deeply for the chat template") from None
        except BadRequest as error:
            raise BadRequest(hidden.show(error.message), param=error.param) from None
        return Rendered(hidden.pieces(hidden.cut(text) if continue_final_message else text))

    def _form(self, with_tools: bool) -> _Form:
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self._forms:
                return self._forms[name]
        raise BadRequest(f"the model has chat templates {', '.join(self._forms)}, and none is the default")


class _Form:
    """One template and what it can do."""

    def __init__(self, source: str) -> None:
        try:
            self.compiled = compile_template(source)
        except TemplateSyntaxError as error:
            raise StartupError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None
        except (TemplateError, RecursionError) as error:
            raise StartupError(f"the chat template cannot be compiled: {error}") from None
        self._source = source
        self.knows_developer = "developer" in source

    @cached_property
    def takes_objects(self) -> bool:
        """Whether tool arguments should be an object, as most templates want, or JSON text, which a few add to text."""
        if "arguments" not in self._source:
            return True
        return self._writes_call({_PROBE_KEY: 1}) or not self._writes_call(f'{{"{_PROBE_KEY}": 1}}')

    def _writes_call(self, arguments: Any) -> bool:
        call = {"id": _PROBE_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            text = run(self.compiled, {"messages": turns, "add_generation_prompt": False}, 1.0)
        except Exception:  # whatever a template of a stranger does: the answer is no
            return False
        return f"{{'{_PROBE_KEY}'" not in text  # Python's way of writing an object, which no model was trained on


class _Hidden:
    """Control words that a user typed, out of the template's sight and back again.

    While the template runs, each is a number that nobody can guess: digits survive what templates do to text (trim,
    case, JSON). What is a control word in the result was written by the template, and what was hidden is text.
    """

    def __init__(self, control: re.Pattern[str]) -> None:
        self._control = control
        self._nonce = str(secrets.randbelow(9 * 10**23) + 10**23)
        self._words: list[str] = []
        self.mark = f"{self._nonce}end "

    def hide(self, value: Any) -> Any:
        """A copy of a JSON value with its control words hidden."""
        return map_strings(value, lambda text: self._control.sub(self._replace, text))

    def show(self, text: str) -> str:
        return "".join(piece.text for piece in self.pieces(text))

    def pieces(self, text: str) -> tuple[Piece, ...]:
        """The text with hidden words shown again, as pieces of their own."""
        if not self._words:
            return (Piece(text),)
        parts = re.split(rf"{self._nonce}(\d{{6}})", text)  # text, number, text, number, ..., text
        found = [
            Piece(self._words[int(part)], trusted=False) if place % 2 else Piece(part)
            for place, part in enumerate(parts)
        ]
        return tuple(piece for piece in found if piece.text)

    def cut(self, text: str) -> str:
        """The text up to the mark that ends the last message.

        The mark ends in a space: where the template has trimmed it, it would have trimmed the message.
        """
        place = text.rfind(self.mark.rstrip())
        if place < 0:
            raise BadRequest(
                "the chat template leaves out the final message, so it cannot be continued", param="messages"
            )
        return text[:place] if text.startswith(self.mark, place) else text[:place].rstrip()

    def _replace(self, match: re.Match[str]) -> str:
        if len(self._words) == MAX_CONTROL_WORDS:
            raise BadRequest(f"the messages hold more than {MAX_CONTROL_WORDS} control words", param="messages")
        self._words.append(match[0])
        return f"{self._nonce}{len(self._words) - 1:06d}"


def load_template(
    checkpoint: Checkpoint, control_words: Iterable[str], override: str | None, timeout: float
) -> ChatTemplate | None:
    """The template that a server uses.

    Args:
        override: a file with a template, which goes before the model's own (`--chat-template`).

    Returns:
        None if there is no template, or the model's own is not valid (the log says why): such a model has no chat.

    Raises:
        StartupError: `override` cannot be read or is not valid.
    """
    names = checkpoint.tokenizer_config
    variables = {key: value for key, value in names.items() if key.endswith("_token") and isinstance(value, str)}
    words = tuple(control_words)
    if override is not None:
        return ChatTemplate(
            read_text(Path(override).expanduser()), variables=variables, control_words=words, timeout=timeout
        )
    own = names.get("chat_template")
    if not own:
        return None
    try:
        return ChatTemplate(own, variables=variables, control_words=words, timeout=timeout)
    except StartupError as error:
        _log.warning("%s: %s; chats are refused until --chat-template names another", checkpoint.name, error.message)
        return None


def _run(template: Template, variables: Mapping[str, Any], seconds: float) -> str:
    try:
        return run(template, variables, seconds)
    except TemplateLimit as error:
        raise BadRequest(f"rendering the chat template was stopped: {error}") from None
    except SecurityError as error:
        raise BadRequest(f"the chat template tried something that is not allowed: {error}") from None
    except TemplateError as error:
        raise BadRequest(f"the chat template refuses these messages: {error}", param="messages") from None
    except RecursionError:
        raise
    except Exception as error:  # a stranger's code: any error in it is about these messages
        raise BadRequest(f"the chat template fails on these messages: {error}", param="messages") from None


def _checked(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in extra:
        if name == "chat_template":
            raise BadRequest("a chat template in a request is not accepted", param="chat_template_kwargs")
        if name in _RESERVED or name.startswith("_") or not name.isidentifier():
            raise BadRequest(f"chat_template_kwargs cannot set {name!r}", param="chat_template_kwargs")
    return extra
