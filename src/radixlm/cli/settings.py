"""This module owns what every verb does with the options: read them, warn, and answer `--explain`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from radixlm.config import cli, env
from radixlm.config.explain import explain
from radixlm.config.resolve import Given, Resolved, derive


def settle(
    said: argparse.Namespace, model: str | None = None, weakest: Mapping[str, Given] | None = None
) -> Resolved | None:
    """The configuration that was asked for, or None when `--explain` has been answered instead.

    Args:
        said, model, weakest: as for `config.cli.read`.

    Raises:
        StartupError: a value is wrong, or values contradict each other.
    """
    resolved = cli.read(said, model, weakest)
    for warning in env.strays():
        print(f"radixlm: warning: {warning}", file=sys.stderr)
    if not said.explain:
        return resolved
    kind = resolved.config.device.device
    _, reasons = derive(resolved.config, _device_here() if kind == "auto" else kind)
    print(explain(resolved, reasons))
    return None


def _device_here() -> str:
    """The kind of device that `--device auto` takes on this machine. Imports torch."""
    from radixlm.device.select import choose

    return choose("auto").name
