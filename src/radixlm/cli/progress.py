"""This module owns what is shown while a server or an engine starts: bars where a person is watching, else lines."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from radixlm.config import env

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class StartProgress:
    """One bar (or line) for each process and its present stage: a context. `update` may be called at any rate.

    Args:
        stream: standard error if not given.
        fancy: bars instead of lines; found out from the stream and the environment if not given.
    """

    def __init__(self, stream: TextIO | None = None, fancy: bool | None = None) -> None:
        self._stream = stream or sys.stderr
        self._fancy = self._stream.isatty() and not env.no_color() if fancy is None else fancy
        self._stages: dict[str, str] = {}
        self._bars: dict[str, TaskID] = {}
        self._live: Progress | None = None

    def __enter__(self) -> StartProgress:
        if self._fancy:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._live = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=30),
                TimeElapsedColumn(),
                console=Console(file=self._stream, force_terminal=True),
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def update(self, process: str, stage: str, fraction: float) -> None:
        """A process is at this part (0 to 1) of a stage of its start; 0 means that nobody knows the part."""
        new = self._stages.get(process) != stage
        self._stages[process] = stage
        if self._live is None:
            if new and stage:
                print(f"radixlm: {process}: {stage}", file=self._stream, flush=True)
            return
        if process not in self._bars:
            self._bars[process] = self._live.add_task(process, total=None)
        total = 1.0 if fraction > 0 else None
        self._live.update(self._bars[process], description=f"{process}: {stage}", total=total, completed=fraction)

    def stop(self) -> None:
        """Take the bars away. Safe to call twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None
