"""This module owns which devices there are and which one is taken."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixlm.base.registry import Choice, Entry, Registry

if TYPE_CHECKING:
    from radixlm.device.base import Device


@dataclass(frozen=True, slots=True)
class Probe:
    """Names the `package.module:function` that returns why a device is not there, or None. Empty: it always is."""

    objection: str = ""


#: In order of preference. The null device is last: it is only ever asked for by name, since a CPU is always there.
DEVICES: Registry[Probe] = Registry(
    "device",
    (
        Entry("cuda", "radixlm.device.cuda:CudaDevice", Probe("radixlm.device.cuda:objection")),
        Entry("cpu", "radixlm.device.cpu:CpuDevice", Probe()),
        Entry("null", "radixlm.device.null:facts", Probe()),
    ),
)


def choose(wanted: str) -> Choice:
    """Which device serves `wanted`, a name or `auto`. Raises `StartupError` if it cannot."""
    return DEVICES.select(wanted, lambda entry: _objection(entry, wanted))


def open_device(choice: Choice, rank: int = 0, ranks: int = 1) -> Device:
    """The chosen device, ready for use (any but the null device, which runs no tensors).

    Args:
        rank: of `ranks` processes that compute one model together on this machine.

    Raises:
        StartupError: there are fewer devices than ranks.
    """
    device: Device = DEVICES.get(choice.name).load()(rank, ranks)
    return device


def _objection(entry: Entry[Probe], wanted: str) -> str | None:
    module, _, function = entry.capabilities.objection.partition(":")
    if not function:
        return None
    if wanted not in ("auto", entry.name):
        return "not looked for"  # looking imports its libraries
    reason: str | None = getattr(importlib.import_module(module), function)()
    return reason
