"""This module owns the errors of programs, and the search for the line of the program that caused one.

ProgramError     what went wrong in a program; `where` is its line
`-- TraceError   a program did with a placeholder what needs a value
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from radixlm.base.errors import RadixError

#: Frames that are never the program's: ours, and those of its `with` blocks.
_OURS = (str(Path(__file__).parent), contextlib.__file__)


class ProgramError(RadixError):
    """A failure of a program. `where` is the line of the program that caused it, "" where nobody knows.

    It has the status and the code of the error that it stands for (`__cause__`), if there is one.
    """

    status, code, kind = 400, "program_error", "invalid_request_error"

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where


class TraceError(ProgramError):
    """A traced program asked a placeholder for its value."""

    code = "trace_error"


def at_line(error: BaseException, where: str) -> ProgramError:
    """The error as one of the program, with its line."""
    if isinstance(error, ProgramError) and error.where:
        return error
    message = error.message if isinstance(error, RadixError) else f"{type(error).__name__}: {error}"
    made = ProgramError(message, where)
    if isinstance(error, RadixError):
        made.status, made.code, made.kind, made.param = error.status, error.code, error.kind, error.param
    else:
        made.status, made.kind = 500, "internal_error"
    made.__cause__ = error
    return made


def caller() -> str:
    """`file:line` of the nearest frame that is not of this package."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_OURS):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
