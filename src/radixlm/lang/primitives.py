"""This module owns the words that programs are written in: `gen`, `select`, roles, and their relatives."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from radixlm.lang.errors import ProgramError
from radixlm.lang.ir import METHODS, Gen, Image, Reasoning, RoleBegin, RoleEnd, Row, Select, flat
from radixlm.lang.params import Params, Text, make

#: What `dtype` stands for, as a regular expression.
DTYPES: Mapping[type, str] = {
    int: r"-?[0-9]{1,18}",
    float: r"-?[0-9]{1,18}(\.[0-9]{1,18})?",
    bool: r"(True|False)",
    str: r'"[^"\\\n]*"',
}


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: Text | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Text | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | None = None,
    choices: Sequence[str] | None = None,
    choices_method: str | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    ebnf: str | None = None,
) -> Gen | Select:
    """A text that the model generates here.

    Args:
        name: the variable that holds the text (a list of texts if `n` is above 1; the first is appended).
        max_tokens: of this text; the run's `max_new_tokens` if not given.
        stop: texts that end it; they are not part of it.
        dtype: int, float, bool or str (a string in double quotes): the text is written as one. Needs grammars.
        choices: the text is one of these; the same as `select`.
        regex, json_schema, ebnf: the text matches. At most one; needs a backend with grammars.

    Parameters that are not given are those of the run. See `docs/http.md` for the ranges.

    Raises:
        BadRequest: a parameter has the wrong type.
        ProgramError: parameters that exclude each other.
    """
    given = {
        "max_new_tokens": max_tokens, "min_new_tokens": min_tokens, "n": n, "stop": stop,
        "stop_token_ids": None if stop_token_ids is None else list(stop_token_ids),
        "stop_regex": stop_regex, "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
        "frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty,
        "repetition_penalty": repetition_penalty, "seed": seed, "ignore_eos": ignore_eos,
        "return_logprob": return_logprob, "logprob_start_len": logprob_start_len,
        "top_logprobs_num": top_logprobs_num, "return_text_in_logprobs": return_text_in_logprobs,
        "regex": regex, "ebnf": ebnf,
        "json_schema": dict(json_schema) if isinstance(json_schema, Mapping) else json_schema,
    }  # fmt: skip
    if choices is not None:
        said = [key for key, value in given.items() if value is not None and key != "temperature"]
        if said or dtype is not None:
            raise ProgramError(f"gen with choices generates nothing, so {(said or ['dtype'])[0]} has no meaning there")
        return select(name, choices, temperature or 0.0, choices_method)
    if choices_method is not None:
        raise ProgramError("choices_method needs choices")
    if dtype is not None:
        if dtype not in DTYPES:
            raise ProgramError(f"dtype is {dtype!r}; it is one of int, float, bool, str")
        if regex or json_schema or ebnf:
            raise ProgramError("dtype is a grammar of its own; leave out regex, json_schema and ebnf")
        given["regex"] = DTYPES[dtype]
    return Gen(_name(name), make(given))


def gen_int(name: str | None = None, **parameters: Any) -> Gen | Select:
    """`gen` of a whole number."""
    return gen(name, dtype=int, **parameters)


def gen_string(name: str | None = None, **parameters: Any) -> Gen | Select:
    """`gen` of a string in double quotes."""
    return gen(name, dtype=str, **parameters)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: str | None = None,
) -> Select:
    """The most likely of `choices` here.

    Args:
        name: the variable that holds it.
        temperature: 0: a choice is scored, not drawn.
        choices_method: token_length_normalized (default), greedy_token_selection or
            unconditional_likelihood_normalized; see `lang.choices`.
    """
    if not choices or isinstance(choices, str):
        raise ProgramError("choices is empty; select needs a list of texts to choose from")
    if any(not isinstance(choice, str) or not choice for choice in choices):
        raise ProgramError(
            "choices holds what is no text, or an empty text; every choice is a text with something in it"
        )
    if len(set(choices)) < len(choices):
        raise ProgramError("choices holds the same text twice")
    if temperature > 1e-5:
        raise ProgramError(f"temperature is {temperature}; select takes the most likely choice, so it must be 0")
    method = choices_method or METHODS[0]
    if method not in METHODS:
        raise ProgramError(f"choices_method is {method!r}; it is one of {', '.join(METHODS)}")
    return Select(_name(name), tuple(choices), method)


def image(source: str | os.PathLike[str]) -> Image:
    """A picture, for backends whose model sees: a URL (http, https, data) or a file."""
    return Image(os.fspath(source))


def separate_reasoning(expr: Any, model_type: str = "auto") -> Reasoning:
    """Texts generated in `expr` are stored without their reasoning, which goes to `<name>_reasoning_content`.

    Args:
        model_type: a format of reasoning by name, as `--reasoning-parser` takes it; "auto" for `<think>`.
    """
    return Reasoning(tuple(flat(expr)), model_type)


def system(expr: Any) -> Row:
    """A system message."""
    return _role("system", expr)


def user(expr: Any) -> Row:
    """A message of the user."""
    return _role("user", expr)


def assistant(expr: Any) -> Row:
    """A message of the assistant: what is generated in it is the model's turn."""
    return _role("assistant", expr)


def system_begin() -> RoleBegin:
    return RoleBegin("system")


def system_end() -> RoleEnd:
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    return RoleBegin("user")


def user_end() -> RoleEnd:
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    return RoleEnd("assistant")


def _role(role: str, expr: Any) -> Row:
    return Row((RoleBegin(role), *flat(expr), RoleEnd(role)))


def _name(name: str | None) -> str:
    if name is not None and (not isinstance(name, str) or not name):
        raise ProgramError(f"the name of a variable is a text, not {name!r}")
    return name or ""


#: For `gen` and the runs alike.
__all__ = [
    "Params", "assistant", "assistant_begin", "assistant_end", "gen", "gen_int", "gen_string", "image", "select",
    "separate_reasoning", "system", "system_begin", "system_end", "user", "user_begin", "user_end",
]  # fmt: skip
