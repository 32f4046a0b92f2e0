"""This module owns who binds and who connects: every link of the ring is a row here, in a private directory made per
server.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

#: Prefix of the directories, by which those of a dead server can be recognised.
PREFIX = "radixlm-"
CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class Topology:
    """Addresses of one server's inboxes. Whoever reads an inbox binds it; everybody else connects.

    inbox        bound by       fed by
    api          api process    detokenizer (texts), engine (ready, replies)
    engine       engine         api process (requests), detokenizer (stops)
    detokenizer  detokenizer    engine (tokens)
    """

    directory: Path

    @classmethod
    def create(cls) -> Topology:
        """A fresh directory that only this user can enter (mode 0700). Its path is short: socket paths have 107 bytes
        at most.
        """
        return cls(Path(tempfile.mkdtemp(prefix=PREFIX)))

    @property
    def api(self) -> str:
        return f"ipc://{self.directory}/api"

    @property
    def engine(self) -> str:
        return f"ipc://{self.directory}/engine"

    @property
    def detokenizer(self) -> str:
        return f"ipc://{self.directory}/detokenizer"

    @property
    def config_file(self) -> Path:
        return self.directory / CONFIG_FILE

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
