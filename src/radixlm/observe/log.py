"""This module owns the form of log lines: aligned text for people, JSON for machines.

Modules log to `logging.getLogger("radixlm.<part>")` and pass what a line is about as fields: `extra={"rid": rid}`.
What clients wrote is never logged: a field with one of the names in `PRIVATE` shows its length alone.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from typing import Any, TextIO

ROOT = "radixlm"
PRIVATE = frozenset({"prompt", "text", "messages", "content", "input", "output", "body", "token_ids", "input_ids"})

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_COLORS = {logging.DEBUG: "2", logging.INFO: "32", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "1;31"}
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def setup(
    level: str = "info",
    form: str = "text",
    *,
    role: str = "",
    color: bool | None = None,
    stream: TextIO | None = None,
) -> None:
    """Send every `radixlm` logger to one stream. Calling it again replaces the earlier set-up.

    Args:
        level: least severe lines to print: debug, info, warning or error.
        form: text or json.
        role: what this process is, e.g. `engine`; on every line of either form.
        color: colour the text form; None: if the stream is a terminal.
        stream: standard error by default.
    """
    stream = stream if stream is not None else sys.stderr
    handler = logging.StreamHandler(stream)
    handler.set_name(ROOT)
    if form == "json":
        handler.setFormatter(JsonFormatter(role))
    else:
        handler.setFormatter(TextFormatter(role, stream.isatty() if color is None else color))
    logger = logging.getLogger(ROOT)
    for old in [old for old in logger.handlers if old.name == ROOT]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(_LEVELS[level])
    logger.propagate = False


class TextFormatter(logging.Formatter):
    """`2026-01-31 14:05:06.789 INFO    engine   message  rid=abc tokens=12`: one line, then the traceback if any."""

    def __init__(self, role: str = "", color: bool = False) -> None:
        super().__init__()
        self._role = role
        self._color = color

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        level = f"{record.levelname:<7}"
        part = f"{self._role or _part(record):<8}"
        fields = "".join(f"{self._dim(f' {name}=')}{_word(value)}" for name, value in _fields(record).items())
        if self._color:
            level = f"\x1b[{_COLORS.get(record.levelno, '0')}m{level}\x1b[0m"
        line = (
            f"{self._dim(f'{moment}.{int(record.msecs):03d}')} {level} {self._dim(part)} {_line(record.getMessage())}"
        )
        if fields:
            line += f" {fields}"
        trouble = _trouble(self, record)
        return f"{line}\n{trouble}" if trouble else line

    def _dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._color else text


class JsonFormatter(logging.Formatter):
    """One object a line: time (ISO 8601, UTC), level, logger, role, message, the fields, and `exception` if any."""

    def __init__(self, role: str = "") -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if self._role:
            entry["role"] = self._role
        entry["message"] = record.getMessage()
        for name, value in _fields(record).items():
            entry.setdefault(name, value if not isinstance(value, float) or math.isfinite(value) else str(value))
        if trouble := _trouble(self, record):
            entry["exception"] = trouble
        return json.dumps(entry, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What was passed as `extra`, in its order, without what must not be logged."""
    fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    for name in PRIVATE & fields.keys():
        value = fields[name]
        fields[name] = f"<{len(value)}>" if hasattr(value, "__len__") else "<...>"
    return fields


def _part(record: logging.LogRecord) -> str:
    return record.name.removeprefix(f"{ROOT}.")


def _trouble(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info:
        parts.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def _line(text: str) -> str:
    """Text as one line that cannot pass for another: control characters are escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _word(value: Any) -> str:
    """A field's value; quoted where it would not read as one word."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text and text.isprintable() and not any(char in text for char in ' "='):
        return text
    return json.dumps(text)
