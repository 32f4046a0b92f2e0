"""This module owns figures as people read them."""

from __future__ import annotations


def size(amount: int) -> str:
    """Bytes for people, in powers of 1000 as memory budgets are given."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= scale:
            return f"{amount / scale:.3g} {unit}"
    return f"{amount} bytes"


def count(amount: int) -> str:
    """Parameters for people: 135M, 7.2B."""
    return f"{amount / 1e9:.2g}B" if amount >= 1e9 else f"{amount / 1e6:.3g}M"
