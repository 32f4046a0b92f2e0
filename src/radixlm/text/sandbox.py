"""This module owns the Jinja environment that chat templates run in: what transformers offers them, and bounds.

Templates come with model files, so they are code of a stranger. The sandbox gives them no way to Python's objects.
Their cost is bounded: every turn of a loop and every piece of output looks at the clock, the output has a limit,
`range` has at most 100,000 steps, and what `+`, `~`, `*` and `**` make has a limit. Not bounded is what one filter or
method call does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

#: Characters that a template may write, and items (of a number: bits) that one value may grow to by an operator.
MAX_SIZE = 64 << 20

#: The name under which a template's loops find the clock. No template or caller may use it.
_TICK = "_radixlm_tick"


class TemplateLimit(TemplateError):
    """A template ran too long or grew too large."""


def compile_template(source: str) -> Template:
    """Raises `jinja2.TemplateSyntaxError` with the line that is wrong."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, _Clocked, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_namespace
    )
    return environment.from_string(source)


def run(template: Template, variables: Mapping[str, Any], seconds: float) -> str:
    """What the template writes.

    Raises:
        TemplateLimit: it took longer than `seconds`, or wrote too much.
        jinja2.TemplateError and whatever a wrong expression raises.
    """
    deadline = time.monotonic() + seconds

    def tick() -> str:
        if time.monotonic() > deadline:
            raise TemplateLimit(f"it takes longer than {seconds:g} s")
        return ""

    parts, size = [], 0
    for part in template.generate({**variables, _TICK: tick}):
        tick()
        size += len(part)
        if size > MAX_SIZE:
            raise TemplateLimit(f"it writes more than {MAX_SIZE} characters")
        parts.append(part)
    return "".join(parts)


class _Code(CodeGenerator):
    """Jinja joins the operands of `~` without asking the sandbox. Here it asks."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with bounds on what operators make."""

    code_generator_class = _Code
    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size_of_result(operator, left, right) > MAX_SIZE:
            raise TemplateLimit(f"{operator!r} makes a value that is too large")
        return super().call_binop(context, operator, left, right)

    def joined(self, values: tuple[Any, ...]) -> str:
        """`a ~ b ~ c`."""
        texts = [str(value) for value in values]
        if sum(map(len, texts)) > MAX_SIZE:
            raise TemplateLimit("'~' makes a text that is too large")
        return "".join(texts)


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the assistant said, for training. Here it marks nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Clocked(Extension):
    """Looks at the clock at the top of every loop's body."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        in_for = False
        previous = ""
        for token in stream:
            yield token
            if previous == "block_begin":
                in_for = token.test("name:for")
            if in_for and token.type == "block_end":
                for kind, value in _TICK_CALL:
                    yield Token(token.lineno, kind, value)
                in_for = False
            previous = token.type


_TICK_CALL = (("variable_begin", "{{"), ("name", _TICK), ("lparen", "("), ("rparen", ")"), ("variable_end", "}}"))


class _Dict:
    """`dict(...)` without the class behind it."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)


class _Namespace(Namespace):
    """Jinja's `namespace()`, which refuses names that would shadow Python's own attributes."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


def _namespace(*args: Any, **values: Any) -> _Namespace:
    made = _Namespace()
    for name, value in dict(*args, **values).items():
        made[name] = value
    return made


def _size_of_result(operator: str, left: Any, right: Any) -> int:
    """How large a result could be: items of a text or list, bits of a number."""
    sizes = [len(value) if hasattr(value, "__len__") else None for value in (left, right)]
    if operator == "+" and None not in sizes:
        return len(left) + len(right)
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
    if operator == "*":
        for size, times in ((sizes[0], right), (sizes[1], left)):
            if size is not None and isinstance(times, int):
                return size * times
    return 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML; models are trained on plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
