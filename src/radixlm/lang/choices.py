"""This module owns the methods by which `select` picks one of its choices from the log-probabilities of their tokens.

A choice is scored by the tokens of prompt + choice from where the first of the choices departs from the prompt's own
tokens, so that a choice which changes how the end of the prompt is tokenized is compared over the same stretch of text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from radixlm.lang.backends.base import Scored


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def token_length_normalized(scored: Sequence[Scored]) -> list[float]:
    """The mean log-probability of a choice's tokens."""
    return [mean(choice.given) for choice in scored]


def unconditional_likelihood_normalized(scored: Sequence[Scored]) -> list[float]:
    """The mean of what the prompt adds to the log-probability of each token: a choice that is likely everywhere gains
    nothing by that (Holtzman et al., 2021, "Surface form competition").
    """
    return [mean([a - b for a, b in zip(choice.given, choice.alone, strict=True)]) for choice in scored]


def greedy_token_selection(scored: Sequence[Scored]) -> list[float]:
    """Token by token, the choices that go on with the most likely token stay. A choice that has ended is taken to go on
    with its mean. The rank of a choice is for how many tokens it stays; the last one that stays is the best.
    """
    longest = max(len(choice.given) for choice in scored)
    alive = list(range(len(scored)))
    stayed = [0.0] * len(scored)
    for place in range(longest):
        best = max(alive, key=lambda index: _at(scored[index], place)[0])
        token = _at(scored[best], place)[1]
        # by token, not by score: rounding may differ between the rows of a batch
        alive = [index for index in alive if index == best or (token >= 0 and _at(scored[index], place)[1] == token)]
        for index in alive:
            stayed[index] = float(place + 1)
    return stayed


def _at(choice: Scored, place: int) -> tuple[float, int]:
    """(log-probability, token) at a place; -1 behind the end."""
    if place < len(choice.given):
        return choice.given[place], choice.ids[place]
    return mean(choice.given), -1


METHODS: Mapping[str, Callable[[Sequence[Scored]], list[float]]] = {
    "token_length_normalized": token_length_normalized,
    "greedy_token_selection": greedy_token_selection,
    "unconditional_likelihood_normalized": unconditional_likelihood_normalized,
}


def choose(method: str, choices: Sequence[str], scored: Sequence[Scored]) -> tuple[int, dict[str, Any]]:
    """(index of the choice, what `get_meta_info` tells). Of equals the first is taken."""
    ranks = METHODS[method](scored)
    index = max(range(len(ranks)), key=lambda i: ranks[i])
    return index, {
        "choices": list(choices),
        "scores": ranks,
        "normalized_prompt_logprobs": token_length_normalized(scored),
        "input_token_logprobs": [list(zip(choice.given, choice.ids, strict=True)) for choice in scored],
    }
