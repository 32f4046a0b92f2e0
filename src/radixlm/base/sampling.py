"""This module owns `SamplingParams`: how one sequence's next tokens are chosen and when it ends."""

from __future__ import annotations

import math

import msgspec

from radixlm.base.errors import BadRequest

#: A temperature below this is greedy: dividing by it would overflow, and its distribution has one token anyway.
GREEDY_TEMPERATURE = 1e-3
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Frozen sampling parameters under their native names.

    Text-level fields (stop strings, special tokens) live in `base.request.TextParams`: the engine never sees text.

    Attributes:
        max_new_tokens: tokens to generate at most; 0 computes the prompt only (scoring, cache warming).
        min_new_tokens: end-of-text and stop ids cannot be chosen before this many tokens exist.
        temperature: 0 (or below `GREEDY_TEMPERATURE`) is greedy.
        top_k: -1 keeps the whole vocabulary.
        seed: the text is a function of (prompt, parameters, seed), whatever else is in the batch.
        stop_token_ids: ids that end the sequence, besides the model's own list.
        logit_bias: (token id, bias added to its logit) pairs.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def penalised(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    def check(self, vocab_size: int) -> None:
        """Raise `BadRequest` naming the first parameter out of range.

        The public names of fields are used in messages; an HTTP dialect with other names maps `param` itself.
        """
        for name, low, high, open_low in (
            ("temperature", 0.0, math.inf, False),
            ("top_p", 0.0, 1.0, True),
            ("min_p", 0.0, 1.0, False),
            ("frequency_penalty", -2.0, 2.0, False),
            ("presence_penalty", -2.0, 2.0, False),
            ("repetition_penalty", 0.0, 2.0, True),
        ):
            value = getattr(self, name)
            below = value <= low if open_low else value < low
            if not math.isfinite(value) or below or value > high:
                bracket = "(" if open_low else "["
                raise BadRequest(f"{name} is {value}; it must be finite and in {bracket}{low}, {high}]", param=name)
        if self.top_k == 0 or self.top_k < -1:
            raise BadRequest(f"top_k is {self.top_k}; use -1 for the whole vocabulary, or at least 1", param="top_k")
        if self.max_new_tokens < 0:
            raise BadRequest(f"max_new_tokens is {self.max_new_tokens}; it must be 0 or more", param="max_new_tokens")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise BadRequest(
                f"min_new_tokens is {self.min_new_tokens}; it must be between 0 and max_new_tokens "
                f"({self.max_new_tokens})",
                param="min_new_tokens",
            )
        if not -MAX_SEED - 1 <= self.seed <= MAX_SEED:
            raise BadRequest(f"seed is {self.seed}; it must fit in 64 signed bits", param="seed")
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise BadRequest(
                    f"stop_token_ids holds {token}, out of vocabulary: ids run from 0 to {vocab_size - 1}",
                    param="stop_token_ids",
                )
        for token, bias in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise BadRequest(
                    f"logit_bias names token {token}, out of vocabulary: ids run from 0 to {vocab_size - 1}",
                    param="logit_bias",
                )
            if not -100.0 <= bias <= 100.0:
                raise BadRequest(
                    f"logit_bias for token {token} is {bias}; it must be in [-100, 100]", param="logit_bias"
                )
