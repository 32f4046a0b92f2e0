"""This module owns the options that `run`, `chat` and `demo` share: whom to ask, and how answers are sampled."""

from __future__ import annotations

import argparse
from typing import Any, Final

from radixlm.base.errors import StartupError
from radixlm.cli.screen import Screen
from radixlm.cli.talk import Local, Remote, Talker
from radixlm.config import cli, env
from radixlm.config.resolve import Given, Resolved

#: Tokens of an answer at most, unless the user says otherwise: a small model may not find an end.
MAX_TOKENS: Final = 512

#: Weaker than anything the user says: these verbs talk to a person, who does not read an engine's log.
QUIET: Final = {
    "log_level": Given("warning", "default of this verb", "log_level"),
    "log_stats_interval": Given(0.0, "default of this verb", "log_stats_interval"),
}

_SAMPLING: Final = (
    ("temperature", float, "0 always takes the likeliest token"),
    ("top_p", float, "sample from the likeliest tokens that together have this probability"),
    ("top_k", int, "sample from this many of the likeliest tokens"),
    ("min_p", float, "sample from tokens at least this likely, relative to the likeliest"),
    ("repetition_penalty", float, "above 1 makes tokens that occurred less likely"),
    ("frequency_penalty", float, "taken off a token's score for each time it was generated"),
    ("presence_penalty", float, "taken off a token's score once it was generated"),
)


def add_asking(parser: cli.Parser) -> None:
    """Give a parser `--url`, the sampling flags and, behind them, the options of an engine."""
    group = parser.add_argument_group("answers")
    group.add_argument("--system", metavar="TEXT", help="system message (the chat template's own)")
    group.add_argument(
        "--max-tokens",
        "--max-new-tokens",
        dest="max_new_tokens",
        type=int,
        metavar="N",
        default=MAX_TOKENS,
        help=f"tokens of an answer at most ({MAX_TOKENS})",
    )
    for name, kind, text in _SAMPLING:
        flag = f"--{name.replace('_', '-')}"
        metavar = "N" if kind is int else "X"
        group.add_argument(flag, type=kind, metavar=metavar, help=f"{text} (the model's)")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the answer before this text; may be repeated"
    )
    group = parser.add_argument_group("where")
    group.add_argument("--url", help="ask a running OpenAI-compatible server instead of loading a model here")
    group.add_argument("--api-key", metavar="TEXT", dest="url_key", help="key for that server (RADIXLM_API_KEY)")
    cli.add_options(parser, owners=cli.ENGINE, shown=("model", "device"))


def sampling(said: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given, under their native names."""
    names = ["max_new_tokens", *(name for name, *_ in _SAMPLING), "stop"]
    given = {name: getattr(said, name) for name in names if getattr(said, name) is not None}
    if getattr(said, "random_seed", None) is not None and said.url:
        given["seed"] = int(said.random_seed)
    return given


def kinds() -> dict[str, type]:
    """The numeric sampling parameters and their types."""
    return {"max_new_tokens": int, **{name: kind for name, kind, *_ in _SAMPLING}}


def talker(said: argparse.Namespace, resolved: Resolved, screen: Screen) -> Talker:
    """The model to talk to, loaded or reached.

    Raises:
        RadixError: it cannot be.
    """
    if said.url:
        named = resolved.config.model.model if resolved.origins["model"] != "default" else None
        return Remote(said.url, said.url_key or env.twins().get("api_key"), named)
    from radixlm.llm import Engine

    with screen.busy(f"loading {resolved.config.model.model}"):
        return Local(Engine(resolved.config))


def check_sampling(given: dict[str, Any]) -> None:
    """Refuse what no server would take, before a model is loaded for it."""
    if given["max_new_tokens"] < 1:
        raise StartupError(f"--max-tokens is {given['max_new_tokens']}; it must be at least 1")
