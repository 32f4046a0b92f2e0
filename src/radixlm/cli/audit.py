"""This module owns `radixlm audit-config`: what in a set-up is unsafe, without starting anything.

`docs/security.md` says what the server defends against; this tells where a configuration gives that away.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from radixlm.base.errors import StartupError
from radixlm.cli.banner import keyed, loopback
from radixlm.cli.screen import Screen
from radixlm.cli.settings import settle
from radixlm.config import cli, env
from radixlm.config.schema import Config, LimitsConfig

Level = Literal["unsafe", "note"]

#: Characters of a key that can be guessed by trying.
SHORT_KEY: Final = 20

#: A commit of a hub model: 40 hexadecimal digits.
COMMIT: Final = 40

#: Limits that were raised so far that a few requests can hold a server up: (field, largest value that is fine).
LARGE: Final = (
    ("max_body_bytes", 256 << 20),
    ("max_grammar_bytes", 16 << 20),
    ("grammar_timeout", 60.0),
    ("template_timeout", 60.0),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """
    Attributes:
        level: unsafe (somebody who should not can do something) or note (worth knowing).
        text: what, and what to do.
    """

    level: Level
    option: str
    text: str


def parser() -> cli.Parser:
    made = cli.Parser(
        "radixlm audit-config",
        "Look at a configuration as `radixlm serve` would read it, and warn of what is unsafe. Nothing is started and "
        "no model is read. Exit code 0 when nothing is unsafe, else 2. Every option of `radixlm serve` is accepted.",
        "radixlm audit-config [MODEL] [options]",
    )
    made.add_argument("argument", metavar="MODEL", nargs="?", help="the same as --model MODEL")
    cli.add_options(made, shown=("server", "limits"))
    return made


def main(argv: Sequence[str]) -> int:
    said = parser().parse(argv)
    resolved = settle(said, said.argument)
    if resolved is None:
        return 0
    config = resolved.config
    found = [*findings(config, resolved.origins), *files(config, said.config or env.config_file())]
    screen = Screen()
    for finding in sorted(found, key=lambda finding: finding.level != "unsafe"):
        screen.line(f"{finding.level:<6}  {finding.option}: {finding.text}", "bold yellow" if _unsafe(finding) else "")
    count = sum(map(_unsafe, found))
    if count:
        screen.line(f"{count} unsafe; docs/security.md has the reasons", "bold yellow")
        return 2
    screen.line("nothing unsafe was found", "bold green")
    return 0


def _unsafe(finding: Finding) -> bool:
    return finding.level == "unsafe"


def findings(config: Config, origins: Mapping[str, str]) -> Iterator[Finding]:
    """What the values say. Looks at no file.

    Args:
        origins: where each value was given, see `config.resolve.Resolved`.
    """
    server = config.server
    open_to_all = not loopback(server.host)
    if open_to_all and not keyed(config):
        text = f"other machines can reach {server.host} and no key is asked for; set api-key-file or a loopback host"
        yield Finding("unsafe", "host", text)
    if open_to_all:
        yield Finding(
            "note",
            "host",
            "the server speaks plain HTTP: without a proxy with TLS in front, keys can be read on the way",
        )
    if server.allowed_origins and "*" in server.allowed_origins.split(",") and not keyed(config):
        yield Finding("unsafe", "allowed-origins", "any web page that a user opens can use this server; list origins")
    if server.admin_api_key and not keyed(config):
        yield Finding("unsafe", "admin-api-key", "only control asks for a key; requests are open to all")
    for name, key in (("api-key", server.api_key), ("admin-api-key", server.admin_api_key)):
        if key is None:
            continue
        if len(key) < SHORT_KEY or len(set(key)) < SHORT_KEY // 2:
            text = "is short or repeats itself and can be guessed; `openssl rand -hex 32` makes a good one"
            yield Finding("unsafe", name, text)
        if origins[name.replace("-", "_")].startswith("flag"):
            twin = f"RADIXLM_{name.replace('-', '_').upper()}"
            yield Finding("unsafe", name, f"a flag shows in the list of processes; use {twin} or api-key-file")
    if server.api_key and server.admin_api_key in (None, server.api_key) and server.api_key_file is None:
        yield Finding("note", "admin-api-key", "whoever may ask may also flush the cache and abort all requests")
    yield from _bounds(config)
    model = config.model
    hub = "/" in model.model and not Path(model.model).expanduser().exists()
    if hub and len(model.revision or "") != COMMIT:
        text = "a hub model is taken as it is on the day of the start; name a commit to get the same files always"
        yield Finding("note", "revision", text)
    if config.observe.log_level == "debug":
        yield Finding("note", "log-level", "debug lines are meant for development")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        yield Finding("note", "user", "this user is root; the server needs no rights: give it a user of its own")


def _bounds(config: Config) -> Iterator[Finding]:
    schedule, limits = config.schedule, config.limits
    if not schedule.queue_timeout and not schedule.request_timeout:
        text = "no request is ever too old: with many waiting, clients give up before their turn comes"
        yield Finding("note", "queue-timeout", text)
    if not config.observe.watchdog_timeout:
        yield Finding("note", "watchdog-timeout", "an engine that hangs is not noticed")
    defaults = LimitsConfig()
    for name, most in LARGE:
        value = getattr(limits, name)
        if value > most:
            text = f"is {value:g}; a few requests can hold the server up (the default is {getattr(defaults, name):g})"
            yield Finding("unsafe", name.replace("_", "-"), text)


def files(config: Config, config_file: str | None) -> Iterator[Finding]:
    """What the files say that the configuration names."""
    server = config.server
    if server.api_key_file is not None:
        from radixlm.api.keyfile import read_keys

        try:
            read_keys(server.api_key_file)
        except StartupError as error:
            yield Finding("unsafe", "api-key-file", error.message)
        yield from _mode("api-key-file", server.api_key_file, 0o077, "others can read it; chmod 600")
    if config_file is not None:
        text = Path(config_file).expanduser().read_text(encoding="utf-8").replace("_", "-")
        if "api-key:" in text:
            yield from _mode("config", config_file, 0o077, "holds a key and others can read it; chmod 600")
        yield from _mode("config", config_file, 0o022, "others can change it")
    if config.model.chat_template is not None:
        yield from _mode("chat-template", config.model.chat_template, 0o022, "others can change it")
    if Path(config.model.model).expanduser().exists():
        yield from _mode("model", config.model.model, 0o022, "others can change the model's files")


def _mode(option: str, path: str, bits: int, text: str) -> Iterator[Finding]:
    try:
        mode = Path(path).expanduser().stat().st_mode
    except OSError:
        return  # that it is not there is for the server to say
    if stat.S_IMODE(mode) & bits:
        yield Finding("unsafe", option, f"{path} has mode {stat.S_IMODE(mode):03o}: {text}")
