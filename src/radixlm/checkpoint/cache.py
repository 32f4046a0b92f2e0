"""This module owns the cache directory: things made once, kept under a name, complete or not there at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from radixlm.base.errors import StartupError


def default_root() -> Path:
    """Where the user's environment says that caches go."""
    from radixlm.config.env import cache_dir

    return cache_dir()


@dataclass(frozen=True, slots=True)
class Cache:
    """Directories under `root`. Any number of processes may use it at once."""

    root: Path

    def directory(self, name: str, fill: Callable[[Path], None], waiting: Callable[[], None] = lambda: None) -> Path:
        """The directory `name`, made by `fill` if it is not there.

        `fill` writes into a fresh directory that gets its name when it is complete: an interrupted run leaves nothing
        that a later one would mistake for the whole. One process fills; others wait for it.

        Args:
            fill: writes the content into the directory it is given.
            waiting: called once if another process is filling it.

        Raises:
            StartupError: the directory cannot be written (whatever `fill` raises comes through as well).
        """
        final = self.root / name
        if final.is_dir():
            return final
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with self._lock(name, waiting):
                if not final.is_dir():
                    self._fill(name, final, fill)
        except OSError as error:
            raise StartupError(
                f"cannot write {final}: {error.strerror or error}; RADIXLM_CACHE names another directory for caches"
            ) from None
        return final

    def _fill(self, name: str, final: Path, fill: Callable[[Path], None]) -> None:
        for leftover in self.root.glob(f".{name}.????????.part"):  # of a run that was killed: the lock is ours
            shutil.rmtree(leftover, ignore_errors=True)
        made = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".part", dir=self.root))
        try:
            fill(made)
            made.chmod(0o755)
            made.rename(final)
        finally:
            shutil.rmtree(made, ignore_errors=True)

    @contextmanager
    def _lock(self, name: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Held by the process: a crash releases it."""
        handle = os.open(self.root / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
