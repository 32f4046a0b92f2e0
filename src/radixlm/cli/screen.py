"""This module owns `Screen`: plain text, or colours and a spinner where a person is watching."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from radixlm.config import env

if TYPE_CHECKING:
    from rich.console import Console


class Screen:
    """Standard output for answers and tables, standard error for what happens meanwhile.

    Args:
        fancy: colours and a spinner; found out from the streams and the environment if not given.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, fancy: bool | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self.fancy = self._out.isatty() and not env.no_color() if fancy is None else fancy
        self._rich: Console | None = None

    def write(self, text: str) -> None:
        """Text of a model, as it comes. On a terminal without its control characters: they could do anything there."""
        self._out.write(_printable(text) if self.fancy else text)
        self._out.flush()

    def think(self, text: str) -> None:
        """What a model thinks, dim, as it comes. Only where a person is watching: it is no part of the answer."""
        if self.fancy:
            self._out.write(f"\x1b[2m{_printable(text)}\x1b[0m")
            self._out.flush()

    def line(self, text: str = "", style: str = "") -> None:
        """A line of ours. `style` is a rich style (`bold`, `dim`), without effect where there are no colours."""
        if self.fancy and style:
            self._console().print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._out, flush=True)

    def warn(self, text: str) -> None:
        print(text, file=self._err, flush=True)

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Rows of equally many cells; the last one wraps where a person is watching."""
        self.line(title, "bold")
        if self.fancy:
            from rich.padding import Padding
            from rich.table import Table
            from rich.text import Text

            grid = Table.grid(padding=(0, 2))
            for row in rows:
                grid.add_row(*(Text(cell) for cell in row[:-1]), Text(row[-1], style="dim" if len(row) > 2 else ""))
            self._console().print(Padding(grid, (0, 0, 0, 2)))
            return
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] if rows else []
        for row in rows:
            padded = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)]
            self.line("  " + "  ".join((*padded, row[-1])).rstrip())

    @contextlib.contextmanager
    def busy(self, message: str) -> Iterator[None]:
        """Say that something takes a while: a spinner where a person is watching, else one line on standard error."""
        if self.fancy:
            with self._console().status(message):
                yield
        else:
            self.warn(f"{message} ...")
            yield

    def _console(self) -> Console:
        if self._rich is None:
            from rich.console import Console

            self._rich = Console(file=self._out, force_terminal=True)
        return self._rich


def _printable(text: str) -> str:
    return "".join(
        character for character in text if character in "\n\t" or character.isprintable() or ord(character) > 159
    )
