"""This module owns `radixlm env`: versions and settings as text, to paste into a bug report."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Final

from radixlm.cli.version import of
from radixlm.config import env
from radixlm.config.cli import Parser

#: What the server is made of, in the order in which it matters.
PACKAGES: Final = (
    "radixlm",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "huggingface_hub",
    "numpy",
    "msgspec",
    "pyzmq",
    "starlette",
    "uvicorn",
    "uvloop",
    "jinja2",
)


def main(argv: Sequence[str]) -> int:
    Parser("radixlm env", "Print versions and settings, for a bug report. Secrets are starred.", "radixlm env").parse(
        argv
    )
    rows = [
        ("python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("platform", platform.platform()),
        *((package, of(package) or "not installed") for package in PACKAGES),
        ("cache directory", str(env.cache_dir())),
        *env.report().items(),
    ]
    width = max(len(name) for name, _ in rows)
    print("```")
    for name, value in rows:
        print(f"{name.ljust(width)}  {value}")
    print("```")
    return 0
