"""This module owns `Request`: what a client asked, valid and frozen. The engine's own view is `schedule.sequence`."""

from __future__ import annotations

from typing import Literal

import msgspec

from radixlm.base.sampling import SamplingParams


class Parsing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the detokenizer takes a text apart into pieces (see `base.pieces`).

    Attributes:
        tools: format of the tool calls to look for, "" for none.
        reasoning: format of the reasoning to look for, "" for none.
        thinking: the text begins inside the reasoning: the prompt opened it.
        names: functions that may be called; a call of another one stays text.
        texts: (function, parameter) pairs whose value is a text. Formats that write values without quotes need it.
    """

    tools: str = ""
    reasoning: str = ""
    thinking: bool = False
    names: tuple[str, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()


class TextParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the detokenizer needs to know of one sequence. It passes through the engine untouched.

    Attributes:
        stop: strings that end the sequence; the match is cut from the text unless `keep_stop`.
        stop_regex: the same with regular expressions (Python `re` syntax).
        min_new_tokens: stop strings are not looked for before this many tokens exist.
        stream: deltas are wanted as they come; else one message at the end.
        stream_interval: tokens between two deltas of a stream.
        return_text_in_logprobs: token texts are wanted beside token logprobs.
        parsing: how to take the text apart, None for a text that is only text.
    """

    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    keep_stop: bool = False
    min_new_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stream: bool = False
    stream_interval: int = 1
    return_text_in_logprobs: bool = False
    parsing: Parsing | None = None


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the generated text must match.

    Attributes:
        kind: json_schema | json_object | regex | ebnf | structural_tag | choice.
        text: the schema (JSON), the expression, the grammar, the tag (JSON), or the choices (a JSON list of texts).
        backend: the library to compile it with, "" for the default one.
        after: the grammar starts behind the first occurrence of these tokens (the end of the reasoning); () at once.
        param: the field that the client gave it in, for errors.
    """

    kind: str
    text: str
    backend: str = ""
    after: tuple[int, ...] = ()
    param: str = ""


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A bound on the reasoning that precedes an answer.

    Attributes:
        budget: tokens of reasoning at most; then `end` is put in their place, without sampling.
        end: the tokens that end the reasoning.
    """

    budget: int
    end: tuple[int, ...]


#: How the hidden states of a prompt become one vector: that of its last token, of its first, or their mean.
PoolingKind = Literal["last", "first", "mean"]


class LogprobParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which log-probabilities to return. Always those of the raw model: before temperature, penalties and filters.

    Attributes:
        top: alternatives per position (0: the chosen token alone).
        prompt_from: first prompt position to score, -1 for none. Position 0 has no score (nothing precedes it).
        token_ids: ids whose log-probability is wanted at every scored position.
    """

    top: int = 0
    prompt_from: int = -1
    token_ids: tuple[int, ...] = ()


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to generate. `n` choices are `n` requests that share a prefix; the tree makes that cheap.

    Attributes:
        uid: unique within the server, assigned by the api process; what the ring speaks of.
        rid: the client's name for it; several requests (choices, batch items) may share one.
        tokens: prompt token ids, at least one, each within the vocabulary.
        namespace: prefix-cache compartment (tenant salt); only equal namespaces share pages.
        priority: larger goes first where priorities are enabled.
        arrival: seconds, `time.time()`, when the api process accepted it.
        deadline: seconds, `time.time()`, after which it is ended with a time-out; 0 for none.
        session: its pages are held softly under this name after it has ended; "" for not.
        pooling: a vector of the prompt is wanted instead of a text; `max_new_tokens` is then 0.
        tenant: whose it is, for fair shares; "" where nobody is told apart. A name, never a secret.
        share: weight of the tenant beside the others, above 0.
    """

    uid: int
    rid: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    text: TextParams = TextParams()
    logprobs: LogprobParams | None = None
    grammar: Grammar | None = None
    thinking: Thinking | None = None
    namespace: str = ""
    priority: int = 0
    arrival: float = 0.0
    deadline: float = 0.0
    session: str = ""
    pooling: PoolingKind | None = None
    tenant: str = ""
    share: float = 1.0
