"""This module owns the verbs of the `radixlm` command: which there are, who runs them, and how failures are told.

Nothing heavy is imported here: `radixlm --help` must not wait for torch.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from radixlm.base.errors import RadixError, StartupError
from radixlm.config import env
from radixlm.config.options import nearest


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb: `target` is a module with `main(argv) -> exit code`."""

    target: str
    usage: str
    help: str


VERBS: Final[Mapping[str, Verb]] = types.MappingProxyType(
    {
        "serve": Verb("radixlm.cli.serve", "serve [MODEL]", "start the server (OpenAI-compatible HTTP)"),
        "run": Verb("radixlm.cli.run", "run [MODEL] PROMPT", "answer one prompt, streaming, without a server"),
        "chat": Verb("radixlm.cli.chat", "chat [MODEL]", "chat in the terminal; shows what the prefix cache saves"),
        "demo": Verb("radixlm.cli.demo", "demo [MODEL]", "two questions about one document: what the cache saves"),
        "doctor": Verb(
            "radixlm.cli.doctor", "doctor [MODEL]", "this machine, the backends chosen and why, a memory plan"
        ),
        "audit-config": Verb("radixlm.cli.audit", "audit-config", "warn of what is unsafe in a server's configuration"),
        "bench": Verb("radixlm.bench.main", "bench KIND", "measure: serve, offline, one-batch, programs"),
        "env": Verb("radixlm.cli.report", "env", "versions and settings, to paste into a bug report"),
        "completion": Verb(
            "radixlm.cli.completion", "completion", "a script that completes verbs and flags in the shell"
        ),
        "version": Verb("radixlm.cli.version", "version", "print the version"),
    }
)

_USAGE: Final = "radixlm VERB [options]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Returns:
        The exit code: 0 fine, 1 a bug of ours, 2 something the reader can put right, 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except RadixError as error:
        return _fail(words, error.message, 2)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe has gone (`radixlm env | head`). Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _fail(words, f"{type(error).__name__}: {error} (a bug; --log-level debug shows where)", 1)


def overview() -> str:
    """What `radixlm --help` prints."""
    width = max(len(verb.usage) for verb in VERBS.values())
    lines = [f"  {verb.usage.ljust(width)}  {verb.help}" for verb in VERBS.values()]
    return "\n".join(
        (
            f"usage: {_USAGE}",
            "",
            "Serve language models; every request reuses the KV cache of every earlier one.",
            "",
            *lines,
            "",
            "`radixlm VERB --help` lists the options of a verb.",
        )
    )


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        if len(words) > 1 and words[1] in VERBS:
            return _run([words[1], "--help"])
        print(overview())
        return 0
    name = "version" if words[0] in ("-V", "--version") else words[0]
    if name not in VERBS:
        hint = nearest(name, VERBS)
        raise StartupError(
            f"unknown verb {name!r}; " + (f"did you mean {hint}?" if hint else f"there are {', '.join(VERBS)}")
        )
    try:
        return int(importlib.import_module(VERBS[name].target).main(words[1:]))
    except SystemExit as stop:  # argparse ends like this after printing help
        return stop.code if isinstance(stop.code, int) else 0


def _fail(words: Sequence[str], message: str, code: int) -> int:
    """Tell of the exception being handled: one line, and the traceback only to those who debug."""
    if _debugging(words):
        traceback.print_exc()
    print(f"radixlm: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _debugging(words: Sequence[str]) -> bool:
    """Whether tracebacks are wanted. Looks at the raw words: parsing them may be what failed."""
    said = [words[i + 1] for i, word in enumerate(words[:-1]) if word.replace("_", "-") == "--log-level"]
    said += [word.partition("=")[2] for word in words if word.replace("_", "-").startswith("--log-level=")]
    level = said[-1] if said else env.twins().get("log_level", "")
    return level == "debug"
