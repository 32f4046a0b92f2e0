"""This module owns `/tokenize` and `/detokenize`: exactly the tokens that the generating routes would see."""

from __future__ import annotations

from typing import Any

import msgspec

from radixlm.api.limits import Json
from radixlm.api.protocols.chat_prompt import read_prompt, render
from radixlm.api.protocols.fields import Reader
from radixlm.api.protocols.prompts import check_ids, read_prompts
from radixlm.api.service import Service
from radixlm.base.errors import BadRequest


class TokenizeFields(msgspec.Struct, kw_only=True, frozen=True):
    model: str | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(msgspec.Struct, kw_only=True, frozen=True):
    model: str | None = None
    tokens: list[Any] | None = None
    skip_special_tokens: bool | None = None


TOKENIZE = Reader(TokenizeFields)
DETOKENIZE = Reader(DetokenizeFields)


async def tokenize(body: Json, service: Service) -> Json:
    """`prompt` (a text or a list of texts) or `messages` to ids."""
    fields = TOKENIZE.read(body)
    if fields.model:
        service.served.check(fields.model)
    many = False
    if body.get("messages") is not None:
        encoded = [list((await render(read_prompt(body), service, limited=False)).tokens)]
    elif body.get("prompt") is not None:
        texts, many = read_prompts(body["prompt"], service, "prompt")
        encoded = await _encode(texts, fields, service)
    else:
        raise BadRequest("give a prompt or messages", param="prompt")
    counts = [len(ids) for ids in encoded]
    answer: Json = {
        "tokens": encoded if many else encoded[0],
        "count": counts if many else counts[0],
        "max_model_len": service.facts.model.context_length,
    }
    if fields.return_token_strs:
        names = [[service.tokenizer.token_bytes(token).decode(errors="replace") for token in ids] for ids in encoded]
        answer["token_strs"] = names if many else names[0]
    return answer


async def _encode(texts: list[Any], fields: TokenizeFields, service: Service) -> list[list[int]]:
    if not all(isinstance(text, str) for text in texts):
        raise BadRequest("prompt must be a text or a list of texts", param="prompt")
    special, parse = fields.add_special_tokens is not False, fields.parse_special is not False

    def work() -> list[list[int]]:
        return [service.tokenizer.encode(text, add_special_tokens=special, parse_special=parse) for text in texts]

    return await service.workers.run(sum(map(len, texts)), work)


async def detokenize(body: Json, service: Service) -> Json:
    """`tokens` (a list of ids or a list of such lists) to text. Control words are kept unless `skip_special_tokens`."""
    fields = DETOKENIZE.read(body)
    if fields.model:
        service.served.check(fields.model)
    if fields.tokens is None:
        raise BadRequest("tokens is missing", param="tokens")
    many = bool(fields.tokens) and all(isinstance(item, list) for item in fields.tokens)
    lists = fields.tokens if many else [fields.tokens]
    vocab_size = service.facts.model.vocab_size
    skip = bool(fields.skip_special_tokens)

    def work() -> list[str]:
        texts = []
        for item in lists:
            ids = check_ids(item, vocab_size, len(item), "tokens")
            service.tokenizer.check(ids)
            texts.append(service.tokenizer.decode(ids, skip))
        return texts

    texts = await service.workers.run(sum(map(len, lists)), work)
    text = texts if many else texts[0]
    return {"text": text, "prompt": text}
