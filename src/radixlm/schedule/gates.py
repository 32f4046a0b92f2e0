"""This module owns the gate of shared prefixes: what several waiting sequences have in common is computed once."""

from __future__ import annotations

from collections.abc import Iterable

from radixlm.base.plan import Ints
from radixlm.cache.ports import Cache
from radixlm.schedule.sequence import Sequence

#: Shorter common prefixes are cheaper to compute twice than to wait a step for.
WORTH_WAITING = 32


class PrefixGate:
    """Holds a sequence back while another one, running, computes a prefix that both share and the tree does not have
    yet.

    Chunk by chunk the runner-up's match grows, and when nothing shared is left to come it passes. If the one ahead is
    cancelled, it is gone from `running` and the gate opens.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._ahead: list[tuple[str, Ints]] = []

    def begin(self, running: Iterable[Sequence]) -> None:
        self._ahead = [
            (s.request.namespace, s.token_array(s.prompt_len))
            for s in running
            if s.finish is None and s.computed < s.prompt_len
        ]

    def admitted(self, sequence: Sequence) -> None:
        if sequence.prompt_len >= WORTH_WAITING:
            self._ahead.append((sequence.request.namespace, sequence.token_array(sequence.prompt_len)))

    def admits(self, sequence: Sequence) -> bool:
        if not self._ahead or sequence.prefix_limit < WORTH_WAITING:
            return True
        tokens = sequence.token_array(sequence.prefix_limit)
        cached = -1
        for namespace, ahead in self._ahead:
            if namespace != sequence.request.namespace or len(ahead) < WORTH_WAITING:
                continue
            # Most pairs differ within a few tokens; only the others are compared whole.
            if ahead[0] != tokens[0] or ahead[WORTH_WAITING - 1] != tokens[WORTH_WAITING - 1]:
                continue
            if cached < 0:
                cached = self._cache.match(tokens, namespace)
            if common_length(ahead, tokens) - cached >= WORTH_WAITING:
                return False
        return True


def common_length(a: Ints, b: Ints) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).argmax() if n else 0
    if n and a[different] == b[different]:
        return n
    return int(different)
