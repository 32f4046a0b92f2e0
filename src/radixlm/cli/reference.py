"""This module owns the reference of verbs and options: `radixlm serve --help-markdown > docs/cli.md`."""

from __future__ import annotations

from radixlm.cli.main import VERBS
from radixlm.config import env
from radixlm.config.cli import TITLES
from radixlm.config.options import OPTIONS, Option

_INTRO = f"""\
# Command line

This page is generated: `radixlm serve --help-markdown > docs/cli.md`.

## Verbs

| command | what it does |
|---|---|
%VERBS%

`run` and `chat` load a model into their own process, or ask a running server with `--url`. `radixlm VERB --help` lists
what a verb accepts. Exit codes: 0 fine, 2 something you can put right (one line says what), 130 interrupted, 1 a bug of
ours; `--log-level debug` adds the traceback.

## Where values come from

A flag wins over its environment variable, that over the YAML file of `--config FILE` (or `{env.CONFIG}`), that over
the default. `radixlm serve --explain` prints every value with its origin and reason. In the file the keys are the
names below, with dashes or underscores, synonyms included:

```yaml
model: smollm2
port: 8000
chunked-prefill-size: 1024
disable-radix-cache: true
```

- Every option has an environment twin: `RADIXLM_` and its name in capitals (`RADIXLM_CHUNKED_PREFILL_SIZE`). An empty
  variable counts as not set; a switch takes 1/0, true/false, yes/no, on/off. Keys are better given there than as
  flags, which other users of the machine can see.
- A switch has an off form, which undoes the environment or the file: `--disable-radix-cache` and
  `--enable-radix-cache`, `--log-requests` and `--no-log-requests`.
- `RADIXLM_CACHE` is the directory for converted models (else `$XDG_CACHE_HOME/radixlm`, else `~/.cache/radixlm`);
  `NO_COLOR` turns colours off. `HF_TOKEN`, `HF_HOME` and the like mean what they mean to the Hugging Face library.
- From Python the same names are keyword arguments: `Engine(model="smollm2", page_size=16)`.

## Options of `radixlm serve`
"""


def reference() -> str:
    """The whole page, as Markdown."""
    verbs = "\n".join(f"| `radixlm {verb.usage}` | {_cell(verb.help)} |" for verb in VERBS.values())
    parts = [_INTRO.replace("%VERBS%", verbs)]
    for owner, title in TITLES.items():
        rows = "\n".join(_row(option) for option in OPTIONS if option.owner == owner)
        parts.append(f"### {title[0].upper()}{title[1:]}\n\n| flag | default | meaning |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(option: Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in option.flags)
    choices = f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""
    meaning = option.help[0].upper() + option.help[1:] + "." + choices
    return f"| {flags} | {_cell(option.default_text)} | {_cell(meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
