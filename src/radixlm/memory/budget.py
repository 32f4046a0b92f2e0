"""This module owns how big the KV pool may be: a pure function from figures to pages and an explanation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from radixlm.base.errors import StartupError

#: Sequences running at once when nobody says otherwise and memory is ample.
MAX_RUNNING = 256

#: Pool tokens that one more running sequence is worth; below that, more rows would only pause each other.
TOKENS_PER_ROW = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a pool is sized from. Memory is in bytes.

    Attributes:
        memory_free: what could be taken now, after the weights were loaded.
        bytes_per_token: keys and values of one token in all layers.
        context_asked: the user named `context_length`; a pool too small for it is then an error.
        share: of the free memory that the pool takes when no fraction was asked for. The rest is for activations, and
            on a CPU for everybody else on the machine.
        mem_fraction_static: share of `memory_total` that weights and pool take together.
    """

    memory_total: int
    memory_free: int
    weight_bytes: int
    bytes_per_token: int
    page_size: int
    context_length: int
    context_asked: bool
    share: float
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    max_running: int | None = None
    most_running: int = MAX_RUNNING  # when `max_running` is not asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The pool's size. `context_length` is the demand's, or what the pool holds if that is less."""

    pages: int
    page_size: int
    bytes: int
    max_running: int
    context_length: int
    reason: str

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size


def budget(demand: Demand) -> Budget:
    """Size the pool.

    Raises:
        StartupError: there is no room for a single page, an asked size does not fit, or the pool cannot hold one
            sequence of the context length that was asked for. The message says which values would do.
    """
    room, why = _room(demand)
    page_bytes = demand.bytes_per_token * demand.page_size
    pages = room // page_bytes
    if demand.max_total_tokens is not None:
        wanted = demand.max_total_tokens // demand.page_size
        if wanted > pages:
            raise StartupError(
                f"a KV pool of {demand.max_total_tokens:,} tokens takes {_gb(wanted * page_bytes)}, more than {why}: "
                f"use --max-total-tokens {pages * demand.page_size} or less"
            )
        pages, why = wanted, "asked for"
    rows = demand.max_running or demand.most_running
    ever_needed = rows * math.ceil(demand.context_length / demand.page_size)
    if demand.max_total_tokens is None and demand.mem_fraction_static is None and pages > ever_needed:
        pages = ever_needed
        why = f"all that {rows} sequences of {demand.context_length:,} tokens can need"
    if pages < 1:
        raise StartupError(
            f"no memory for a KV pool: a page of {demand.page_size} tokens takes {_gb(page_bytes)}, beyond {why}: "
            "use a smaller model or a higher --mem-fraction-static"
            + (", or a higher --max-total-tokens" if demand.max_total_tokens is not None else "")
        )
    tokens = pages * demand.page_size
    _check_context(demand, tokens)
    context = min(demand.context_length, tokens)
    reason = f"{_gb(pages * page_bytes)} for {tokens:,} tokens of {demand.bytes_per_token:,} bytes: {why}"
    if context < demand.context_length:
        reason += f"; sequences are limited to {context:,} of the model's {demand.context_length:,} tokens"
    return Budget(
        pages=pages,
        page_size=demand.page_size,
        bytes=pages * page_bytes,
        max_running=demand.max_running or min(demand.most_running, max(1, tokens // TOKENS_PER_ROW)),
        context_length=context,
        reason=reason,
    )


def _room(demand: Demand) -> tuple[int, str]:
    """Bytes for the pool, and where the figure comes from."""
    free = max(demand.memory_free, 0)
    if demand.mem_fraction_static is None:
        return int(free * demand.share), f"{demand.share:.0%} of the {_gb(free)} that are free beside the weights"
    asked = int(demand.memory_total * demand.mem_fraction_static) - demand.weight_bytes
    share = f"{demand.mem_fraction_static:g} of {_gb(demand.memory_total)} less {_gb(demand.weight_bytes)} of weights"
    if asked > free:
        return free, f"the {_gb(free)} that are free, less than {share}"
    return max(asked, 0), share


def _check_context(demand: Demand, tokens: int) -> None:
    if not demand.context_asked or tokens >= demand.context_length:
        return
    remedies = [f"<= {tokens}"]
    if demand.max_total_tokens is not None:
        remedies.append(f"--max-total-tokens {demand.context_length}")
    else:
        needed = math.ceil(demand.context_length / demand.page_size) * demand.page_size * demand.bytes_per_token
        # Rounded up, so that the value printed is one that works.
        fraction = math.ceil((needed + demand.weight_bytes) / max(demand.memory_total, 1) * 100) / 100
        if needed <= demand.memory_free and fraction < 1:
            remedies.append(f"--mem-fraction-static {fraction:.2f}")
    raise StartupError(
        f"KV pool of {_gb(tokens * demand.bytes_per_token)} holds {tokens:,} tokens, less than "
        f"--context-length {demand.context_length}: use {' or '.join(remedies)}"
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
