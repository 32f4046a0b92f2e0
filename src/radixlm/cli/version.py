"""This module owns `radixlm version`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from radixlm import __version__
from radixlm.config.cli import Parser


def main(argv: Sequence[str]) -> int:
    Parser("radixlm version", "Print the version.", "radixlm version").parse(argv)
    print(f"radixlm {__version__}")
    return 0


def of(package: str) -> str | None:
    """The version of an installed package, without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
