"""This module owns the counts of one answer: what dialects report as usage, under a neutral name each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixlm.wire.messages import TextDelta


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of one answer.

    Attributes:
        prompt: each prompt counts once, however many choices it has.
        completion: of all choices.
        cached: prompt tokens that every choice found in the prefix cache.
        reasoning: completion tokens that were reasoning, its markers included.
    """

    prompt: int
    completion: int
    cached: int
    reasoning: int = 0


class Tally:
    """Counts of one answer, as it comes.

    A prompt counts once, however many choices it has. Its cached tokens are those that every choice found: what later
    choices find was computed by the first.
    """

    def __init__(self, prompt_tokens: Sequence[int], choices: int) -> None:
        self._prompts = list(prompt_tokens)
        self._choices = choices
        self._completion = [0] * (len(self._prompts) * choices)
        self._reasoning = [0] * (len(self._prompts) * choices)
        self._cached: dict[int, int] = {}

    def note(self, index: int, delta: TextDelta) -> None:
        self._completion[index] = max(self._completion[index], delta.completion_tokens)
        self._reasoning[index] = max(self._reasoning[index], delta.reasoning_tokens)
        if delta.stats is not None:
            prompt = index // self._choices
            cached = delta.stats.cached_tokens
            self._cached[prompt] = min(cached, self._cached.get(prompt, cached))

    def counts(self) -> Counts:
        return Counts(sum(self._prompts), sum(self._completion), sum(self._cached.values()), sum(self._reasoning))
