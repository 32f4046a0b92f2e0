"""This module owns `/v1/completions`: text or token ids in, text out; echo and log-probabilities for scoring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from radixlm.api.errors import NotSupported
from radixlm.api.limits import Json, check_count
from radixlm.api.protocols.fields import Reader, refuse
from radixlm.api.protocols.job import Job
from radixlm.api.protocols.logprobs import CompletionLogprobs, Offsets, TokenTexts, completion_logprobs, joined
from radixlm.api.protocols.openai import (
    UNSERVED,
    Common,
    Frame,
    Usage,
    frame,
    make_requests,
    raise_failure,
    read_common,
    usage_of,
)
from radixlm.api.protocols.prompts import Prompt, encode, read_prompts
from radixlm.api.protocols.tally import Tally
from radixlm.api.service import Service
from radixlm.api.sse import DONE
from radixlm.base.errors import BadRequest
from radixlm.base.request import LogprobParams
from radixlm.wire.messages import Scores, TextDelta

#: OpenAI's default of this route.
MAX_TOKENS = 16

REFUSED = {
    **UNSERVED,
    "suffix": "insertion",
    "prompt_logprobs": "use echo with logprobs",
}


class CompletionFields(msgspec.Struct, kw_only=True, frozen=True):
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None


FIELDS = Reader(CompletionFields)


async def parse(body: Json, service: Service) -> Job:
    common = read_common(body, service, id_prefix="cmpl", max_new_tokens=MAX_TOKENS)
    refuse(body, REFUSED)
    fields = FIELDS.read(body)
    _check_best_of(fields.best_of, common)
    if body.get("prompt") is None:
        raise BadRequest("prompt is missing", param="prompt")
    raw, _ = read_prompts(body["prompt"], service, "prompt", common.wish.choices)
    logprobs = None
    if fields.logprobs is not None:
        top = check_count(fields.logprobs, 0, service.config.limits.max_logprobs, "logprobs", "max-logprobs")
        logprobs = LogprobParams(top=top, prompt_from=0 if fields.echo else -1)
    prompts = await encode(service, raw, "prompt", add_special_tokens=fields.add_special_tokens is not False)
    requests = make_requests(common, prompts, logprobs, service, "prompt")
    return Job(
        tuple(requests), common.rid, common.stream, Completions(common, prompts, bool(fields.echo), logprobs, service)
    )


def _check_best_of(best_of: int | None, common: Common) -> None:
    if best_of is None or best_of == common.wish.choices:
        return
    if best_of < common.wish.choices:
        raise BadRequest(f"best_of is {best_of}; it must be at least n ({common.wish.choices})", param="best_of")
    raise NotSupported(
        "best_of larger than n is not supported; ask for n choices and choose among them", param="best_of"
    )


class Choice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    matched_stop: int | str | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET


class Completions:
    """The shape of one answer, whole or in chunks (see `api.sse.Form`)."""

    patient = False

    def __init__(
        self, common: Common, prompts: list[Prompt], echo: bool, logprobs: LogprobParams | None, service: Service
    ) -> None:
        self._common = common
        self._prompts = prompts
        self._echo = echo
        self._per_token = logprobs is not None or common.return_token_ids
        self._service = service
        self._frame: Frame = frame(common, service)
        self._tally = Tally([len(prompt.tokens) for prompt in prompts], common.wish.choices)
        voices = [Voice(prompt, echo, logprobs is not None, common, service) for prompt in prompts]
        self._texts = [ChoiceText(voice) for voice in voices for _ in range(common.wish.choices)]

    def whole(self, results: list[TextDelta]) -> bytes:
        choices = []
        for index, delta in enumerate(results):
            raise_failure(delta, self._service)
            self._tally.note(index, delta)
            self._texts[index].hear(delta)
            choices.append(self._choice(index, delta))
        return self._encoded(choices, usage_of(self._tally.counts()))

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        raise_failure(delta, self._service)
        self._tally.note(index, delta)
        text = self._texts[index]
        text.hear(delta)
        opens = text.opening and self._echo and (delta.ids or delta.finish)
        if not (delta.text or delta.finish or opens or (delta.ids and self._per_token)):
            return
        choice = self._choice(index, delta)
        if self._common.continuous_usage:
            yield self._encoded([choice], usage_of(self._tally.counts()))
        else:
            yield self._encoded([choice], None if self._common.include_usage else UNSET)

    def last(self) -> Iterator[bytes]:
        if self._common.include_usage:
            yield self._encoded([], usage_of(self._tally.counts()))
        yield DONE

    def _choice(self, index: int, delta: TextDelta) -> Choice:
        text = self._texts[index]
        with_ids = self._common.return_token_ids
        prompt = self._prompts[index // self._common.wish.choices].tokens if with_ids and text.opening else UNSET
        said, logprobs = text.say(delta)
        return Choice(
            index,
            said,
            logprobs,
            delta.finish.kind if delta.finish else None,
            delta.finish.matched if delta.finish else UNSET,
            prompt,
            delta.ids if with_ids else UNSET,
        )

    def _encoded(self, choices: list[Choice], usage: Usage | UnsetType | None) -> bytes:
        f = self._frame
        return msgspec.json.encode(
            Completion(f.id, "text_completion", f.created, f.model, f.fingerprint, choices, usage)
        )


class Voice:
    """What the choices of one prompt share.

    Attributes:
        echo: the prompt's text, None if it is not repeated. Ids read as the answer's would: with or without control
            words.
        prompt_texts: how the prompt's tokens look. In a text the client wrote, control words are text.
    """

    def __init__(self, prompt: Prompt, echo: bool, logprobs: bool, common: Common, service: Service) -> None:
        hide = common.wish.text.skip_special_tokens
        self.prompt = prompt
        self.logprobs = logprobs
        self.texts = TokenTexts(service.tokenizer, hide_special=hide)
        self.prompt_texts = TokenTexts(service.tokenizer, hide_special=hide and prompt.text is None)
        self.echo: str | None = None
        if echo:
            decoded = prompt.text
            self.echo = service.tokenizer.decode(prompt.tokens, hide) if decoded is None else decoded


class ChoiceText:
    """Text and log-probabilities of one choice as they come; the echoed prompt goes first.

    Attributes:
        opening: nothing was said yet.
    """

    def __init__(self, voice: Voice) -> None:
        self.opening = True
        self._voice = voice
        self._offsets = Offsets()
        self._prompt_scores = Scores([], [], [])

    def hear(self, delta: TextDelta) -> None:
        """Keep the scores of the prompt, which come in parts before the answer begins."""
        part = delta.prompt_scores
        if part is not None:
            self._prompt_scores.ids.extend(part.ids)
            self._prompt_scores.chosen.extend(part.chosen)
            self._prompt_scores.top.extend(part.top)

    def say(self, delta: TextDelta) -> tuple[str, CompletionLogprobs | None]:
        voice = self._voice
        text = delta.text
        logprobs = None
        if self.opening and voice.echo is not None:
            text = voice.echo + text
            if voice.logprobs:
                logprobs = self._prompt_logprobs(voice.echo)
        self.opening = False
        if voice.logprobs:
            scores = delta.scores or Scores([], [], [])
            offsets = self._offsets.onward(scores.ids, voice.texts)
            answer = completion_logprobs(scores, offsets, voice.texts)
            logprobs = answer if logprobs is None else joined(logprobs, answer)
        return text, logprobs

    def _prompt_logprobs(self, echo: str) -> CompletionLogprobs:
        scores = self._prompt_scores
        if not scores.ids:  # a prompt of one token: nothing precedes it, so nothing is scored
            first = self._voice.prompt.tokens[0]
            scores = Scores([first], [None], [[]])
        offsets = self._offsets.within(echo, scores.ids, self._voice.prompt_texts)
        return completion_logprobs(scores, offsets, self._voice.prompt_texts)
