"""`/generate`: single and batch, cumulative streams, log-probabilities, and failures of one item of many."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from radixlm.wire.messages import Fault
from support.server import Api, logprob, tokenizer

WORDS = tokenizer()


@pytest.fixture(scope="module")
def shared() -> Iterator[Api]:
    with Api() as api:
        yield api


@pytest.fixture
def api(shared: Api) -> Iterator[Api]:
    yield shared
    shared.engine.script = None
    shared.engine.trouble = lambda request, said: None


def test_single_answer(api: Api) -> None:
    api.engine.script = "Hello world"
    body = api.generate(sampling_params={"max_new_tokens": 50}, rid="mine").json
    assert body.keys() == {"text", "output_ids", "meta_info"}
    assert body["text"] == "Hello world" and body["output_ids"] == [*WORDS.encode("Hello world"), *WORDS.eos_ids]
    meta = body["meta_info"]
    assert meta.pop("e2e_latency") >= 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": WORDS.eos_ids[0]},
        "prompt_tokens": len(WORDS.encode("Say it:")),
        "completion_tokens": len(body["output_ids"]),
        "cached_tokens": 0,
        "num_retractions": 0,
    }
    length = api.generate(sampling_params={"max_new_tokens": 1}).json["meta_info"]["finish_reason"]
    assert length == {"type": "length", "length": 1}
    stop = api.generate(sampling_params={"stop": "wor", "no_stop_trim": True}).json
    assert stop["text"] == "Hello wor" and stop["meta_info"]["finish_reason"] == {"type": "stop", "matched": "wor"}
    assert api.run(api.ask("PUT", "/generate", {"text": "a"})).status == 200


def test_streams_repeat_the_text_so_far(api: Api) -> None:
    fields: dict[str, Any] = {"sampling_params": {"max_new_tokens": 12, "seed": 3, "ignore_eos": True}}
    plain = api.generate(**fields).json
    answer = api.generate(**fields, stream=True)
    assert answer.events[-1] == "[DONE]"
    chunks = answer.events[:-1]
    assert len(chunks) > 3
    for before, after in itertools.pairwise(chunks):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    plain["meta_info"].pop("e2e_latency")
    chunks[-1]["meta_info"].pop("e2e_latency")
    plain["meta_info"].pop("id")
    chunks[-1]["meta_info"].pop("id")
    assert chunks[-1] == plain


@pytest.mark.parametrize("stream", [False, True])
def test_batches(api: Api, stream: bool) -> None:
    params = [{"max_new_tokens": 2}, {"max_new_tokens": 5, "n": 2, "seed": 1}, None]
    answer = api.generate(text=["a", "bb", "ccc"], sampling_params=params, rid="job", stream=stream)
    if stream:
        last: dict[int, Any] = {}
        for chunk in answer.events[:-1]:
            last[chunk["index"]] = chunk
        items = [last[i] for i in sorted(last)]
    else:
        items = answer.json
    assert [item["meta_info"]["id"] for item in items] == ["job_0", "job_1", "job_1", "job_2"]
    counts = [item["meta_info"]["completion_tokens"] for item in items]
    assert counts == [2, 5, 5, 128] and items[1]["text"] != items[2]["text"]
    single = api.generate(text=["a"], sampling_params={"max_new_tokens": 1}).json
    assert isinstance(single, list) and len(single) == 1
    assert len(api.generate(sampling_params={"n": 3, "max_new_tokens": 1}).json) == 3


def test_batch_fields_must_fit_the_batch(api: Api) -> None:
    two = ["a", "b"]
    for fields, param in (
        ({"text": two, "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
        ({"text": two, "rid": ["x"]}, "rid"),
        ({"text": two, "return_logprob": [True]}, "return_logprob"),
        ({"text": ["a", [1]]}, "text"),
    ):
        answer = api.generate(**fields)
        assert answer.status == 400 and answer.error["param"] == param
    ids = api.generate(text=two, rid=["x", "y"], sampling_params={"max_new_tokens": 1}).json
    assert [item["meta_info"]["id"] for item in ids] == ["x", "y"]


def test_seeds(api: Api) -> None:
    params = {"max_new_tokens": 8, "ignore_eos": True}
    one = api.generate(sampling_params={**params, "sampling_seed": 5}).json["text"]
    assert api.generate(sampling_params={**params, "seed": 5}).json["text"] == one
    assert api.generate(sampling_params={**params, "seed": 6}).json["text"] != one
    both = api.generate(text=["Say it:", "Say it:"], sampling_params={**params, "seed": 5}).json
    assert [item["text"] for item in both] == [one, one]
    both = api.generate(text=["Say it:", "Say it:"], sampling_params=params).json
    assert both[0]["text"] != both[1]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(api: Api, stream: bool) -> None:
    ids = WORDS.encode("The quick brown fox")
    answer = api.generate(
        text="The quick brown fox", sampling_params={"max_new_tokens": 4, "ignore_eos": True}, stream=stream,
        return_logprob=True, logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=[7, 11],
        return_text_in_logprobs=True, return_prompt_token_ids=True,
    )  # fmt: skip
    body = answer.events[-2] if stream else answer.json
    assert body["prompt_token_ids"] == ids
    meta = body["meta_info"]
    inputs, outputs = meta["input_token_logprobs"], meta["output_token_logprobs"]
    assert [entry[1] for entry in inputs] == ids and [entry[1] for entry in outputs] == body["output_ids"]
    assert inputs[0] == [None, ids[0], "The"] and meta["input_top_logprobs"][0] is None
    assert inputs[2][0] == logprob(ids[2], 2) and "".join(entry[2] for entry in inputs) == "The quick brown fox"
    for entry in [*inputs[1:], *outputs]:
        assert len(entry) == 3 and -9999 <= entry[0] <= 0
    for side, count in (("input", len(ids)), ("output", 4)):
        assert [len(top or [0, 0]) for top in meta[f"{side}_top_logprobs"]] == [2] * count
        picks = meta[f"{side}_token_ids_logprobs"]
        assert len(picks) == count and [[pick[1] for pick in row] for row in picks if row] == [[7, 11]] * (
            count - (side == "input")
        )


def test_logprob_starts(api: Api) -> None:
    ids = WORDS.encode("The quick brown fox")
    fields = {"text": "The quick brown fox", "return_logprob": True, "sampling_params": {"max_new_tokens": 1}}
    meta = api.generate(**fields).json["meta_info"]
    assert meta["input_token_logprobs"] == [] and len(meta["output_token_logprobs"]) == 1
    assert meta["output_token_logprobs"][0][2] is None and "output_top_logprobs" not in meta
    meta = api.generate(**fields, logprob_start_len=3).json["meta_info"]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == ids[3:]
    assert api.generate(**fields, logprob_start_len=len(ids)).json["meta_info"]["input_token_logprobs"] == []
    for bad in (-2, len(ids) + 1, "x", 1.5):
        assert api.generate(**fields, logprob_start_len=bad).error["param"] == "logprob_start_len"
    meta = api.generate(text=None, input_ids=[5], return_logprob=True, logprob_start_len=0).json["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 5, None]]
    for bad_fields, param in (
        ({"top_logprobs_num": 2}, "top_logprobs_num"),
        ({"token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [10**6]}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": ["a"]}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [[1]]}, "token_ids_logprob"),
        ({"return_logprob": 1}, "return_logprob"),
    ):
        assert api.generate(**bad_fields).error["param"] == param
    items = api.generate(
        text=["a b", "c d"],
        return_logprob=[True, False],
        token_ids_logprob=[[3], None],
        sampling_params={"max_new_tokens": 1},
    ).json
    assert "output_token_ids_logprobs" in items[0]["meta_info"]
    assert "output_token_logprobs" not in items[1]["meta_info"]


@pytest.mark.parametrize("stream", [False, True])
def test_one_item_that_fails_does_not_fail_the_batch(api: Api, stream: bool) -> None:
    bad = tuple(WORDS.encode("bad"))
    api.engine.trouble = lambda request, said: (
        Fault(500, "model_error", "not a number") if request.tokens == bad and said == 2 else None
    )
    fields = {"text": ["good", "bad", "fine"], "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    answer = api.generate(**fields, stream=stream)
    assert answer.status == 200
    if stream:
        items = list({chunk["index"]: chunk for chunk in answer.events[:-1]}.values())
        assert answer.events[-1] == "[DONE]"
        items.sort(key=lambda item: item["index"])
    else:
        items = answer.json
    reasons = [item["meta_info"]["finish_reason"]["type"] for item in items]
    assert reasons == ["length", "abort", "length"]
    failed = items[1]["meta_info"]["finish_reason"]
    assert failed == {"type": "abort", "message": "not a number", "status_code": 500, "err_type": "model_error"}
    alone = api.generate(text="bad")
    assert alone.status == 500 and alone.error["message"] == "not a number"
    all_bad = api.generate(text=["bad", "bad"])
    assert all_bad.status == 500 and all_bad.error["code"] == "model_error"


def test_an_aborted_sequence_is_an_answer_here(api: Api) -> None:
    async def go() -> None:
        api.engine.held = True
        call = api.call("POST", "/generate", {"text": "a", "rid": "r1"})
        await api.until(lambda: bool(api.engine.running))
        assert (await api.ask("POST", "/abort_request", {"rid": "r1"})).json == {"aborted": 1}
        answer = await call.end()
        api.engine.held = False
        assert answer.status == 200
        reason = answer.json["meta_info"]["finish_reason"]
        assert reason["type"] == "abort" and reason["status_code"] == 499

    api.run(go())


@pytest.mark.parametrize(
    "fields",
    [{"image_data": "http://x"}, {"lora_path": "x"}, {"input_embeds": [[1.0]]},
     {"return_hidden_states": True}, {"custom_logit_processor": "x"},
     {"sampling_params": {"custom_params": {"x": 1}}}],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(api: Api, fields: dict[str, Any]) -> None:
    answer = api.generate(**fields)
    name = next(iter(fields.get("sampling_params", fields)))
    assert answer.status == 400 and answer.error["code"] == "not_supported"
    assert name in answer.error["message"] and answer.error["param"].endswith(name)
