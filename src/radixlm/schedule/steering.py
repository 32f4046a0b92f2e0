"""This module owns how guides act on sequences: they are made while the sequence waits, hear what was sampled, and what
they force is appended without sampling (jump-forward decoding: Zheng et al., "SGLang", 2024, section 4).

Forced tokens are tokens like any others: the sequence then has more to compute than its last token, in one span. If a
step in flight samples the first of them already, its sample is dropped: the sequence knows what comes.
"""

from __future__ import annotations

from collections.abc import Iterable

from radixlm.base.errors import RadixError
from radixlm.schedule.guide import MakeTicket, Ticket
from radixlm.schedule.sequence import Sequence
from radixlm.wire.messages import Finish


class Steering:
    """A gate (`schedule.ports.Gate`) for sequences whose guide is not ready, and who tells guides what happened.

    Args:
        make: starts to make a request's guide.
        jump: forced tokens that are worth a longer span; 0 for none. Fewer are sampled under a mask of one token.
    """

    def __init__(self, make: MakeTicket, jump: int) -> None:
        self._make = make
        self._jump = jump
        self._coming: dict[int, tuple[Sequence, Ticket]] = {}

    # ---- guides in the making

    def arrived(self, sequence: Sequence) -> None:
        ticket = self._make(sequence.request)
        if ticket is not None:
            self._coming[sequence.uid] = sequence, ticket

    def ready(self) -> list[tuple[Sequence, RadixError | None]]:
        """Sequences that need wait no longer: their guide has come, or the reason why it will not."""
        if not self._coming:
            return []
        found: list[tuple[Sequence, RadixError | None]] = []
        for uid, (sequence, ticket) in list(self._coming.items()):
            if sequence.finish is not None:
                del self._coming[uid]
                continue
            try:
                sequence.guide = ticket.guide()
            except RadixError as error:
                found.append((sequence, error))
            else:
                if sequence.guide is None:
                    continue
                found.append((sequence, None))
            del self._coming[uid]
        return found

    def begin(self, running: Iterable[Sequence]) -> None:
        pass

    def admits(self, sequence: Sequence) -> bool:
        return sequence.uid not in self._coming

    def admitted(self, sequence: Sequence) -> None:
        pass

    # ---- guides at work

    def advance(self, sequence: Sequence) -> list[int]:
        """Append what is forced after the tokens that the guide has taken, and see whether that is the end.

        Returns the tokens appended. Raises `RadixError` from the guide.
        """
        guide, said = sequence.guide, list[int]()
        assert guide is not None
        jumps = self._jump > 0 and sequence.request.logprobs is None
        least = self._jump + sequence.promised  # what a step in flight will sample is not gained
        while sequence.finish is None:
            if guide.done:
                sequence.finish = Finish("stop")
            elif len(sequence.tokens) >= sequence.limit:
                sequence.finish = Finish("length")
            elif not jumps or len(guide.forced()) < least:
                break
            else:
                if not said:
                    self._foretell(sequence)
                    least = 1
                token = guide.forced()[0]
                sequence.tokens.append(token)
                said.append(token)
                if token in sequence.stop_ids and sequence.generated > sequence.request.sampling.min_new_tokens:
                    sequence.finish = Finish("stop", token)
                else:
                    guide.take(token)
        sequence.jumped += len(said)
        return said

    def _foretell(self, sequence: Sequence) -> None:
        """The tokens from here on are known: what is being sampled is not needed, and the device has to be told."""
        assert sequence.promised <= 1, "a guided sequence is sampled with everything before it settled"
        sequence.foretold += sequence.promised
        sequence.promised = 0
        if sequence.row >= 0 and sequence.unwritten < 0:
            sequence.unwritten = len(sequence.tokens)
