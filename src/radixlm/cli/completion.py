"""This module owns `radixlm completion`: a script that completes verbs, flags and their values in bash (and zsh)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Final

from radixlm.cli.main import VERBS
from radixlm.config.cli import Parser
from radixlm.config.options import OPTIONS

#: Verbs whose modules have a `parser`: their flags can be listed.
_PARSED: Final = ("serve", "run", "chat", "demo", "doctor", "audit-config")

_SCRIPT: Final = """\
_radixlm() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} words=
    case $before in
{values}
    esac
    if [[ -z $words && $COMP_CWORD -eq 1 ]]; then
        words="{verbs}"
    elif [[ -z $words && $word == -* ]]; then
        case ${{COMP_WORDS[1]}} in
{flags}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _radixlm radixlm
"""


def main(argv: Sequence[str]) -> int:
    Parser(
        "radixlm completion",
        'Print a completion script. In bash: eval "$(radixlm completion)". In zsh, `autoload -U bashcompinit; '
        "bashcompinit` goes before it.",
        "radixlm completion",
    ).parse(argv)
    print(script(), end="")
    return 0


def script() -> str:
    values = [
        f'        {"|".join(option.flags)}) words="{" ".join(option.choices)}" ;;'
        for option in OPTIONS
        if option.choices
    ]
    flags = [f'            {verb}) words="{" ".join(_flags(verb))}" ;;' for verb in _PARSED]
    return _SCRIPT.format(values="\n".join(values), verbs=" ".join(VERBS), flags="\n".join(flags))


def _flags(verb: str) -> list[str]:
    parser: Parser = importlib.import_module(VERBS[verb].target).parser()
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
