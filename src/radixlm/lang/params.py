"""This module owns `Params`: what a program says about sampling, for a whole run and for one call."""

from __future__ import annotations

from typing import Any

import msgspec

from radixlm.base.errors import BadRequest

Text = str | list[str]


class Params(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters under the names of the native dialect. None: nobody said.

    Attributes:
        max_new_tokens: tokens of one call at most.
        logprob_start_len: first token of the prompt whose log-probability is wanted; -1 for the answer alone.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    stop: Text | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: Text | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None

    def over(self, other: Params) -> Params:
        """These parameters, and those of `other` where these say nothing."""
        return Params(**{**other.said(), **self.said()})

    def said(self) -> dict[str, Any]:
        """What was said, by name."""
        found: dict[str, Any] = msgspec.to_builtins(self)  # which leaves out what has its default
        return found

    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


#: Names that are not of `sampling_params` but of the request around it.
AROUND = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")

#: Grammars; at most one at a time.
GRAMMARS = ("regex", "json_schema", "ebnf")

#: What a run uses where nobody says anything, whatever the model's own defaults are.
RUN = Params(max_new_tokens=128, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0)


def make(given: dict[str, Any]) -> Params:
    """Parameters from arguments, those that are None left out.

    Raises:
        BadRequest: one has the wrong type, or there are two grammars; the message names it.
    """
    said = {
        name: list(value) if isinstance(value, tuple) else value for name, value in given.items() if value is not None
    }
    if isinstance(said.get("json_schema"), dict):
        said["json_schema"] = msgspec.json.encode(said["json_schema"]).decode()
    try:
        params = msgspec.convert(said, Params)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{error}") from None
    grammars = [name for name in GRAMMARS if getattr(params, name)]
    if len(grammars) > 1:
        raise BadRequest(f"{' and '.join(grammars)} are given together; one grammar at a time", param=grammars[1])
    return params
