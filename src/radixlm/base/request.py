"""This module owns `Request`: what a client asked, valid and frozen. The engine's own view is `schedule.sequence`."""

from __future__ import annotations

import msgspec

from radixlm.base.sampling import SamplingParams


class TextParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the detokenizer needs to know of one sequence. It passes through the engine untouched.

    Attributes:
        stop: strings that end the sequence; the match is cut from the text unless `keep_stop`.
        stop_regex: the same with regular expressions (Python `re` syntax).
        min_new_tokens: stop strings are not looked for before this many tokens exist.
        stream: deltas are wanted as they come; else one message at the end.
        stream_interval: tokens between two deltas of a stream.
        return_text_in_logprobs: token texts are wanted beside token logprobs.
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
    """

    uid: int
    rid: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    text: TextParams = TextParams()
    logprobs: LogprobParams | None = None
    namespace: str = ""
    priority: int = 0
    arrival: float = 0.0
    deadline: float = 0.0
