"""This module owns the command line of the options: parsers generated from the schema, and reading what they parsed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from radixlm.base.errors import StartupError
from radixlm.config import env, file
from radixlm.config.options import BY_NAME, OPTIONS, Option, nearest
from radixlm.config.resolve import Given, Resolved, resolve

#: Every owner, with the title of its group in `--help`.
TITLES: Final = {
    "model": "model",
    "device": "device",
    "cache": "KV cache",
    "schedule": "scheduling",
    "server": "server",
    "limits": "limits of a request",
    "observe": "logs, metrics and watchdog",
}
#: Owners of the options that an engine without a server has.
ENGINE: Final = ("model", "device", "cache", "schedule", "observe")


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises instead of exiting, takes underscores in flags, and names the nearest of an
    unknown one."""

    def __init__(self, prog: str, description: str, usage: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            usage=usage,
            allow_abbrev=False,
            add_help=False,
            formatter_class=_Formatter,
        )
        self.add_argument("-h", "--help", action="help", help="show this help and exit")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse everything.

        Raises:
            StartupError: an unknown flag or argument, or one without its value.
        """
        known, unknown = self.parse_known_args([_dashes(word) for word in argv])
        if not unknown:
            return known
        flag = next((word for word in unknown if word.startswith("-")), None)
        if flag is None:
            raise StartupError(f"unexpected argument {unknown[0]!r}; see {self.prog} --help")
        name = flag.partition("=")[0]
        hint = nearest(name, self._option_string_actions)
        raise StartupError(
            f"unknown flag {name}; " + (f"did you mean {hint}?" if hint else f"{self.prog} --help lists all flags")
        )

    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message}; see {self.prog} --help")


class _Formatter(argparse.HelpFormatter):
    """Help with the value's name once, after all spellings of the flag."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=6)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, action.dest.upper())}"


def add_options(parser: Parser, owners: Sequence[str] = tuple(TITLES), shown: Sequence[str] = tuple(TITLES)) -> None:
    """Give a parser the options of some owners, and `--config` and `--explain`.

    Args:
        shown: the owners whose options are listed in help; the others are accepted in silence.
    """
    for owner in owners:
        group = parser.add_argument_group(TITLES[owner])
        for option in OPTIONS:
            if option.owner == owner:
                _add(group, option, owner in shown)
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--config", metavar="FILE", help=f"YAML file with the same names as the flags (no file; {env.CONFIG})"
    )
    group.add_argument("--explain", action="store_true", help="print every value with its origin and reason, then exit")


def read(
    namespace: argparse.Namespace, model: str | None = None, weakest: Mapping[str, Given] | None = None
) -> Resolved:
    """Flags, then environment, then file, then `weakest`, then defaults.

    Args:
        model: the model if it was given as a plain argument.
        weakest: defaults of a verb that differ from those of the schema.

    Raises:
        StartupError: a wrong value, or values that contradict each other.
    """
    flags = _flags(namespace)
    if model is not None:
        said = flags.get("model")
        if said is not None and said.value != model:
            raise StartupError(f"two models are given: {model} and, with --model, {said.value}", param="model")
        flags["model"] = Given(BY_NAME["model"].check(model, "the model"), "argument", "model")
    path = namespace.config or env.config_file()
    return resolve((flags, environment(), file.read(path) if path else {}, weakest or {}))


def environment() -> Mapping[str, Given]:
    """The twins that are set, as a layer."""
    layer = {}
    for name, text in env.twins().items():
        option = BY_NAME[name]
        try:
            value = option.parse(text, option.env)
        except StartupError as error:
            if option.name == "port" and "://" in text:
                raise StartupError(
                    f"{error.message}. An orchestrator sets it like this for a service called radixlm: "
                    "rename the service, or turn its service links off",
                    param="port",
                ) from None
            raise
        layer[name] = Given(value, f"env {option.env}", option.env)
    return layer


def _flags(namespace: argparse.Namespace) -> dict[str, Given]:
    layer: dict[str, Given] = {}
    for option in OPTIONS:
        if not hasattr(namespace, option.name):
            continue
        said = getattr(namespace, option.name)
        flag = option.flags[0]
        value = said if option.kind is bool else option.parse(said, flag)
        layer[option.name] = Given(value, f"flag {flag}", flag)
    return layer


def _add(group: argparse._ArgumentGroup, option: Option, shown: bool) -> None:
    help_text = (
        f"{option.help} ({option.default_text}; {option.env})".replace("%", "%%") if shown else argparse.SUPPRESS
    )
    if option.kind is bool:
        group.add_argument(
            *option.flags, dest=option.name, action="store_true", default=argparse.SUPPRESS, help=help_text
        )
        off = [f"--{key}" for key in option.off_keys]
        group.add_argument(
            *off, dest=option.name, action="store_false", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        return
    metavar = (
        "{" + ",".join(option.choices) + "}" if option.choices else {int: "N", float: "X"}.get(option.kind, "TEXT")
    )
    group.add_argument(*option.flags, dest=option.name, metavar=metavar, default=argparse.SUPPRESS, help=help_text)


def _dashes(word: str) -> str:
    """`--page_size=16` -> `--page-size=16`; the value is left alone."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
