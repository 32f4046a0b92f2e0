"""This module owns the device that computes nothing, for simulations of the scheduler and tests of the server."""

from __future__ import annotations

from radixlm.base.facts import DeviceFacts


def facts() -> DeviceFacts:
    return DeviceFacts(kind="null", name="null device", memory_total=0, memory_free=0, cores=1)
