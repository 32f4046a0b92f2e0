"""This module owns who binds and who connects: every link of the ring is a row here, in a private directory made per
server.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from radixlm.base.errors import StartupError
from radixlm.config.resolve import to_flat
from radixlm.config.schema import Config

#: Prefix of the directories, by which those of a dead server can be recognised.
PREFIX = "radixlm-"
CONFIG_FILE = "config.json"

#: Bytes that the path of a unix socket may have on every system (Linux allows 107, macOS 103).
LONGEST_PATH = 103


@dataclass(frozen=True, slots=True)
class Topology:
    """Addresses of one engine's inboxes. Whoever reads an inbox binds it; everybody else connects.

    inbox        bound by       fed by
    api          api process    detokenizer (texts), engine (ready, replies)
    engine       engine         api process (requests), detokenizer (stops)
    detokenizer  detokenizer    engine (tokens)
    rank-1 ...   that rank      engine (plans; see `wire.plans`)

    Beside them a rank has a pipe that its parent, the engine, reads (see `launch.ranks`), and the ranks meet through a
    file for their collectives (see `parallel`).
    """

    directory: Path

    @classmethod
    def create(cls) -> Topology:
        """A fresh directory that only this user can enter (mode 0700), where temporary files go unless that path is
        too long for sockets.

        Raises:
            StartupError: there is no place for it.
        """
        try:
            made = cls(Path(tempfile.mkdtemp(prefix=PREFIX)))
            if len(os.fsencode(made.directory / "detokenizer")) > LONGEST_PATH:
                made.remove()
                made = cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")))
        except OSError as error:
            raise StartupError(f"cannot make a directory for sockets: {error}; TMPDIR names another place") from None
        return made

    @property
    def api(self) -> str:
        return f"ipc://{self.directory}/api"

    @property
    def engine(self) -> str:
        return f"ipc://{self.directory}/engine"

    @property
    def detokenizer(self) -> str:
        return f"ipc://{self.directory}/detokenizer"

    def rank(self, number: int) -> str:
        return f"ipc://{self.directory}/rank-{number}"

    @property
    def meeting(self) -> Path:
        """Through this file the ranks find each other."""
        return self.directory / "meeting"

    @property
    def config_file(self) -> Path:
        return self.directory / CONFIG_FILE

    def write_config(self, config: Config) -> None:
        """What children read. They need no secrets of the HTTP server, and this file is theirs to read."""
        flat = {**to_flat(config), "api_key": None, "admin_api_key": None}
        self.config_file.write_text(json.dumps(flat))
        self.config_file.chmod(0o600)

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
