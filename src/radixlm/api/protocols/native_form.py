"""This module owns the shape of `/generate`'s answers: text so far, ids so far, and `meta_info`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from radixlm.api import errors
from radixlm.api.protocols.logprobs import TokenTexts, finite
from radixlm.api.service import Service
from radixlm.api.sse import DONE
from radixlm.base.errors import RadixError
from radixlm.base.request import Request
from radixlm.wire.messages import Finish, Scores, TextDelta

#: (log-probability, token id, token text or null)
Scored = tuple[float | None, int, str | None]


@dataclass(frozen=True, slots=True)
class Look:
    """
    Attributes:
        many: the answer is a list, and a sequence that fails does not fail the others.
        texts: token texts beside log-probabilities.
        prompt_ids: the prompt's ids are repeated.
    """

    many: bool
    texts: bool = False
    prompt_ids: bool = False


class Generated:
    """The shape of one answer, whole or as events that each repeat the text so far (see `api.sse.Form`)."""

    def __init__(self, requests: Sequence[Request], look: Look, service: Service) -> None:
        self.patient = look.many
        self._look = look
        self._service = service
        texts = TokenTexts(service.tokenizer, hide_special=False) if look.texts else None
        self._items = [Item(request, texts) for request in requests]

    def whole(self, results: list[TextDelta]) -> bytes:
        if not self._look.many:
            return msgspec.json.encode(self._answer(0, results[0]))
        failures = [delta for delta in results if delta.fault is not None]
        if len(failures) == len(results):
            raise self._error(failures[0])
        return msgspec.json.encode([self._answer(index, delta) for index, delta in enumerate(results)])

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        answer = self._answer(index, delta)
        if self._look.many:
            answer["index"] = index
        yield msgspec.json.encode(answer)

    def last(self) -> Iterator[bytes]:
        yield DONE

    def _answer(self, index: int, delta: TextDelta) -> dict[str, Any]:
        if delta.fault is not None and not self._look.many:
            raise self._error(delta)
        item = self._items[index]
        item.hear(delta)
        answer = item.said()
        if self._look.prompt_ids:
            answer["prompt_token_ids"] = item.request.tokens
        return answer

    def _error(self, delta: TextDelta) -> RadixError:
        return errors.of_delta(delta) or errors.internal()


class Item:
    """What one sequence said so far."""

    def __init__(self, request: Request, texts: TokenTexts | None) -> None:
        self.request = request
        self._texts = texts
        self._text = ""
        self._ids: list[int] = []
        self._meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": None,
            "prompt_tokens": len(request.tokens),
            "completion_tokens": 0,
        }
        if request.logprobs is not None:
            for side in ("input", "output"):
                self._meta[f"{side}_token_logprobs"] = []
                if request.logprobs.top:
                    self._meta[f"{side}_top_logprobs"] = []
                if request.logprobs.token_ids:
                    self._meta[f"{side}_token_ids_logprobs"] = []

    def hear(self, delta: TextDelta) -> None:
        meta = self._meta
        self._text += delta.text
        self._ids.extend(delta.ids)
        meta["completion_tokens"] = max(meta["completion_tokens"], delta.completion_tokens)
        if delta.prompt_scores is not None:
            self._score("input", delta.prompt_scores)
        if delta.scores is not None:
            self._score("output", delta.scores)
        if delta.stats is not None:
            meta["cached_tokens"] = delta.stats.cached_tokens
            meta["num_retractions"] = delta.stats.retractions
            if self.request.grammar is not None or self.request.thinking is not None:
                meta["jump_forward_tokens"] = delta.stats.jump_forward_tokens
        if delta.finish is not None or delta.fault is not None:
            self._score_lone_token()
            meta["finish_reason"] = _finish_reason(delta, meta["completion_tokens"])
            meta["e2e_latency"] = time.time() - self.request.arrival

    def said(self) -> dict[str, Any]:
        return {"text": self._text, "output_ids": self._ids, "meta_info": self._meta}

    def _score_lone_token(self) -> None:
        """A prompt of one token is never scored by the engine, for nothing precedes it; clients expect its entry all
        the same.
        """
        asked, tokens = self.request.logprobs, self.request.tokens
        if asked is not None and asked.prompt_from == 0 and len(tokens) == 1 and not self._meta["input_token_logprobs"]:
            self._score("input", Scores([tokens[0]], [None], [[]]))

    def _score(self, side: str, scores: Scores) -> None:
        asked = self.request.logprobs
        if asked is None:
            return
        meta = self._meta
        meta[f"{side}_token_logprobs"].extend(map(self._scored, scores.chosen, scores.ids))
        for chosen, top, picked in zip(scores.chosen, scores.top, scores.picked or [[]] * len(scores.ids), strict=True):
            if asked.top:
                meta[f"{side}_top_logprobs"].append(
                    None if chosen is None else [self._scored(logprob, token) for token, logprob in top]
                )
            if asked.token_ids:
                meta[f"{side}_token_ids_logprobs"].append(
                    None if chosen is None else list(map(self._scored, picked, asked.token_ids))
                )

    def _scored(self, logprob: float | None, token: int) -> Scored:
        text = self._texts.text(token) if self._texts is not None else None
        return (None if logprob is None else finite(logprob), token, text)


def _finish_reason(delta: TextDelta, completion_tokens: int) -> dict[str, Any]:
    error = errors.of_delta(delta)
    if error is not None:
        return {"type": "abort", "message": error.message, "status_code": error.status, "err_type": error.code}
    finish = delta.finish or Finish("stop")
    if finish.kind == "length":
        return {"type": "length", "length": completion_tokens}
    return {"type": finish.kind, "matched": finish.matched}
