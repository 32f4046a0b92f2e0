"""This module owns `radixlm serve`: from a command line to a configuration, and on to the launcher."""

from __future__ import annotations

from collections.abc import Sequence

from radixlm.cli.progress import StartProgress
from radixlm.cli.screen import Screen
from radixlm.cli.settings import settle
from radixlm.config import cli
from radixlm.config.schema import Config


def parser() -> cli.Parser:
    made = cli.Parser(
        "radixlm serve",
        "Start the server. Each option can also be given in the environment (the name behind its default) or in the "
        "file of --config; flags win over the environment, the environment over the file.",
        "radixlm serve [MODEL] [options]",
    )
    made.add_argument("argument", metavar="MODEL", nargs="?", help="the same as --model MODEL")
    made.add_argument("--help-markdown", action="store_true", help="print the reference of all options, then exit")
    cli.add_options(made)
    return made


def main(argv: Sequence[str]) -> int:
    said = parser().parse(argv)
    if said.help_markdown:
        from radixlm.cli.reference import reference

        print(reference(), end="")
        return 0
    resolved = settle(said, said.argument)
    if resolved is None:
        return 0
    return _serve(resolved.config)


def _serve(config: Config) -> int:
    from radixlm.base.facts import EngineFacts
    from radixlm.cli.banner import banner
    from radixlm.launch.main import serve

    screen = Screen()
    with StartProgress() as progress:

        def ready(facts: EngineFacts, url: str, seconds: float) -> None:
            progress.stop()
            show_banner(screen, banner(facts, config, url, seconds))

        return serve(config, ready, progress.update)


def show_banner(screen: Screen, text: str) -> None:
    """Print a banner; what an operator must not overlook stands out."""
    first, *lines = text.splitlines()
    screen.line(first, "bold green")
    for line in lines:
        screen.line(line, "bold yellow" if "WARNING" in line else "")
