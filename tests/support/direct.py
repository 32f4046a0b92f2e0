"""The engine's loop over the real runner, without hub or detokenizer: token ids in, token ids out, any depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from radixlm.base.request import Request
from radixlm.base.sampling import SamplingParams
from radixlm.config.resolve import override
from radixlm.config.schema import Config
from radixlm.engine.build import make_loop
from radixlm.launch.ranks import started
from radixlm.wire.link import Callback, LocalLink
from radixlm.wire.messages import Drain, Failed, Submit, Tokens


def run_requests(
    options: Mapping[str, Any], prompts: Sequence[Sequence[int]], new: int, depth: int, **more: Any
) -> list[list[int]]:
    """`more`: further fields of every request."""
    inbox: LocalLink[Any] = LocalLink()
    answers: dict[int, list[int]] = {uid: [] for uid in range(len(prompts))}

    def hear(message: Any) -> None:
        assert not isinstance(message, Failed), message
        if isinstance(message, Tokens):
            uids, ids = np.frombuffer(message.uids, np.int64), np.frombuffer(message.ids, np.int32)
            for uid, token in zip(uids.tolist(), ids.tolist(), strict=True):
                answers[uid].append(token)

    more = {"sampling": SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True), **more}
    for uid, prompt in enumerate(prompts):
        inbox.send(Submit(Request(uid=uid, rid=str(uid), tokens=tuple(prompt), **more)))
    inbox.send(Drain(600.0))
    sink: Callback[Any] = Callback(hear)
    with started(override(Config(), options), lambda stage, fraction: None, lambda reason: None) as booted:
        make_loop(booted.config, booted.facts, booted.runner, inbox, sink, sink, depth).run()
    return list(answers.values())
