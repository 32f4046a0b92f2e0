"""Tool calls and reasoning of chats: streams equal whole answers, ids, reasons to end, refusals, prompts that think."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from radixlm.base.request import Parsing, Request, Thinking
from radixlm.text.parsers.choose import Formats, choose
from support.server import TEMPLATE, Answer, Api

Json = dict[str, Any]

F: Json = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
PING: Json = {"type": "function", "function": {"name": "ping"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
PINGED = '<tool_call>{"name": "ping"}</tool_call>'


@pytest.fixture(scope="module")
def shared() -> Iterator[Api]:
    with Api() as api:
        yield api


@pytest.fixture(scope="module")
def thinker() -> Iterator[Api]:
    """A model that reasons: its template opens the reasoning, unless it is told not to."""
    template = TEMPLATE.replace("<quick>", "<think></think>").replace("{% endif %}{% endif %}", "") + (
        "{% else %}<think>\n{% endif %}{% endif %}"
    )
    with Api(template=template) as api:
        yield api


@pytest.fixture
def api(shared: Api) -> Iterator[Api]:
    yield shared
    shared.engine.script = None


def message_of(answer: Answer, index: int = 0) -> tuple[Json, str]:
    """The message of a stream as the official client puts it together, and why it ended."""
    assert answer.status == 200, answer.body
    assert answer.events[-1] == "[DONE]"
    message: Json = {"content": "", "reasoning_content": "", "tool_calls": []}
    reasons = []
    choices = [choice for event in answer.events[:-1] for choice in event["choices"] if choice["index"] == index]
    assert choices[0]["delta"]["role"] == "assistant"
    for choice in choices:
        assert not (reasons and choice["delta"]), "something follows the end"
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"] and call["type"] == "function" and call["function"]["name"]
                assert call["function"]["arguments"] == ""
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(reasons) == 1
    return message, reasons[0]


def both(api: Api, **fields: Any) -> tuple[Json, Answer]:
    """Ask plain and as a stream: they must agree."""
    plain = api.chat(**{"max_tokens": 300, **fields})
    assert plain.status == 200, plain.body
    streamed = api.chat(**{"max_tokens": 300, **fields}, stream=True, stream_options={"include_usage": True})
    assert streamed.events[-2]["usage"] == plain.json["usage"]
    for choice in plain.json["choices"]:
        message, reason = message_of(streamed, choice["index"])
        whole = choice["message"]
        assert reason == choice["finish_reason"]
        assert message["content"] == (whole["content"] or "")
        assert message["reasoning_content"] == whole.get("reasoning_content", "")
        calls = [call["function"] for call in whole.get("tool_calls", ())]
        assert message["tool_calls"] == [{"name": c["name"], "arguments": c["arguments"]} for c in calls]
    return plain.json["choices"][0], plain


def test_calls(api: Api) -> None:
    api.engine.script = f"I look.\n{CALL}\n{PINGED}"
    choice, _ = both(api, tools=[F, PING])
    message = choice["message"]
    assert message["content"] == "I look." and choice["finish_reason"] == "tool_calls"
    first, second = message["tool_calls"]
    assert first["type"] == "function" and first["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert second["function"] == {"name": "ping", "arguments": "{}"}
    assert first["id"] != second["id"] and "index" not in first
    other, _ = both(api, tools=[F, PING])
    assert other["message"]["tool_calls"][0]["id"] != first["id"]


def test_content_is_null_beside_calls_alone(api: Api) -> None:
    api.engine.script = CALL
    choice, _ = both(api, tools=[F])
    assert choice["message"]["content"] is None
    assert "reasoning_content" not in choice["message"]


def test_no_call_no_field(api: Api) -> None:
    api.engine.script = "a < b"
    for tools in ({"tools": [F]}, {"tools": []}, {"tools": None}, {}):
        choice, _ = both(api, **tools)
        assert choice["message"] == {"role": "assistant", "content": "a < b", "refusal": None}
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("fields", [{"tools": [PING]}, {"tools": [F], "tool_choice": "none"}, {}])
def test_what_may_not_be_called_is_text(api: Api, fields: Json) -> None:
    api.engine.script = CALL
    choice, _ = both(api, **fields)
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]


def test_a_call_that_the_limit_cuts(api: Api) -> None:
    api.engine.script = CALL
    size = len(api.served.tokenizer.encode(CALL[: CALL.index(" 1")]))
    choice, _ = both(api, tools=[F], max_tokens=size)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"a":')


def test_choices_have_calls_of_their_own(api: Api) -> None:
    api.engine.script = CALL
    _, plain = both(api, tools=[F], n=3)
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in plain.json["choices"]}
    assert len(ids) == 3


def test_logprobs_cover_every_token(api: Api) -> None:
    api.engine.script = CALL
    fields = {"tools": [F], "logprobs": True, "max_tokens": 300}
    plain = api.chat(**fields).json
    count = plain["usage"]["completion_tokens"]
    assert len(plain["choices"][0]["logprobs"]["content"]) == count
    events = api.chat(**fields, stream=True).events[:-1]
    scored = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    assert sum(len(scores["content"]) for scores in scored) == count


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "zzz"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [F], "tool_choice": 1}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ],
)
def test_refusals(api: Api, fields: Json, param: str) -> None:
    for stream in (False, True):
        answer = api.chat(**fields, stream=stream)
        assert answer.status == 400 and answer.error["param"] == param


def test_ids_are_of_the_form_that_templates_want() -> None:
    with Api(formats=choose("[TOOL_CALLS]")) as mistral:
        mistral.engine.script = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]'
        (call,) = mistral.chat(tools=[F], max_tokens=300).json["choices"][0]["message"]["tool_calls"]
        assert len(call["id"]) == 9 and call["id"].isalnum()
    with Api(formats=choose("<|tool_calls_section_begin|>")) as kimi:
        kimi.engine.script = (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>"
        )
        before = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        told = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [before]}]
        (call,) = kimi.chat(messages=told, tools=[F], max_tokens=300).json["choices"][0]["message"]["tool_calls"]
        assert call["id"] == "functions.f:1"


def test_schemas_tell_texts_from_numbers() -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"t": {"type": "string"}, "n": {"type": "integer"}}}},
    }
    with Api(formats=choose("<arg_key>")) as glm:
        glm.engine.script = "<tool_call>f\n" + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>12</arg_value>\n" for key in ("t", "n")
        )
        (call,) = glm.chat(tools=[tool], max_tokens=300).json["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == '{"t": "12", "n": 12'  # the text ends before the call does
        parsing = glm.engine.requests[-1].text.parsing
        assert parsing == Parsing(tools="glm", names=("f",), texts=(("f", "t"),))


# ---- reasoning


@pytest.fixture
def thinking(thinker: Api) -> Iterator[Api]:
    yield thinker
    thinker.engine.script = None


def test_reasoning_that_the_prompt_opens(thinking: Api) -> None:
    thinking.engine.script = "so 1 < 2\n</think>\n\nYes."
    choice, plain = both(thinking)
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("so 1 < 2", "Yes.")
    assert message["reasoning"] == message["reasoning_content"] and choice["finish_reason"] == "stop"
    details = plain.json["usage"]["completion_tokens_details"]
    tokens = len(thinking.served.tokenizer.encode("so 1 < 2\n</think>"))
    assert abs(details["reasoning_tokens"] - tokens) <= 1
    assert details["reasoning_tokens"] < plain.json["usage"]["completion_tokens"]


def test_reasoning_that_the_model_opens(thinking: Api) -> None:
    thinking.engine.script = "<think>abc</think>xyz"
    for fields in ({}, {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        choice, _ = both(thinking, **fields)
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("abc", "xyz")


def test_reasoning_that_the_limit_cuts(thinking: Api) -> None:
    thinking.engine.script = "alpha beta gamma " * 20 + "</think>done"
    choice, plain = both(thinking, max_tokens=14)
    assert choice["message"]["reasoning_content"] and choice["message"]["content"] is None
    assert choice["finish_reason"] == "length"
    assert plain.json["usage"]["completion_tokens_details"]["reasoning_tokens"] == 14


def test_no_chunk_holds_a_piece_of_a_tag(thinking: Api) -> None:
    thinking.engine.script = "<think>abc</think>xyz"
    for stop in ({}, {"stop": ["QQQQQQQQ"]}):
        answer = thinking.chat(max_tokens=100, stream=True, **stop)
        deltas = [choice["delta"] for event in answer.events[:-1] for choice in event["choices"]]
        assert "".join(delta.get("content", "") for delta in deltas) == "xyz"
        assert not any(mark in json.dumps(deltas) for mark in "<>")


def test_without_thinking_there_is_no_reasoning(thinking: Api) -> None:
    thinking.engine.script = "Yes </think> no."
    choice, _ = both(thinking, chat_template_kwargs={"enable_thinking": False})
    assert choice["message"]["content"] == "Yes </think> no." and "reasoning_content" not in choice["message"]
    told = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>a"}]
    choice, _ = both(thinking, messages=told, continue_final_message=True)
    assert choice["message"]["reasoning_content"] == "Yes" and choice["message"]["content"] == "no."


def test_reasoning_may_be_left_in_the_text(thinking: Api) -> None:
    thinking.engine.script = "abc</think>xyz"
    choice, _ = both(thinking, separate_reasoning=False)
    assert choice["message"]["content"] == "abc</think>xyz"


def test_reasoning_may_come_at_once(thinking: Api) -> None:
    thinking.engine.script = "one, two, three</think>four"
    answer = thinking.chat(max_tokens=100, stream=True, stream_reasoning=False)
    deltas = [choice["delta"] for event in answer.events[:-1] for choice in event["choices"]]
    assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == ["one, two, three"]
    cut = thinking.chat(max_tokens=2, stream=True, stream_reasoning=False)
    message, reason = message_of(cut)
    assert message["reasoning_content"] and reason == "length"


def test_reasoning_before_calls(thinking: Api) -> None:
    thinking.engine.script = f"why {PINGED}</think>{CALL}"
    choice, _ = both(thinking, tools=[F, PING])
    message = choice["message"]
    assert message["reasoning_content"] == f"why {PINGED}" and message["content"] is None
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    assert choice["finish_reason"] == "tool_calls"


# ---- what the requests carry


def carried(api: Api, **fields: Any) -> Request:
    assert api.chat(max_tokens=1, **fields).status == 200
    return api.engine.requests[-1]


def test_grammars_of_calls(api: Api) -> None:
    for fields in ({"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}):
        grammar = carried(api, tools=[F, PING], **fields).grammar
        assert grammar is not None and grammar.kind == "ebnf" and grammar.after == () and "f" in grammar.text
        assert ("ping" in grammar.text) is (fields["tool_choice"] == "required")
    assert carried(api, tools=[F]).grammar is None
    assert carried(api, tools=[F], parallel_tool_calls=True).grammar is None
    assert carried(api, tools=[F], parallel_tool_calls=False).grammar is not None
    strict = {"type": "function", "function": {**F["function"], "strict": True}}
    assert carried(api, tools=[strict]).grammar is not None
    assert carried(api, tools=[strict], tool_choice="none").grammar is None
    named = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [PING]}}
    parsing = carried(api, tools=[F, PING], tool_choice=named).text.parsing
    assert parsing is not None and parsing.names == ("ping",)


def test_other_constraints_beside_tools(api: Api) -> None:
    schema = {"type": "array", "items": {"type": "null"}}
    form = {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}
    grammar = carried(api, tools=[F], response_format=form).grammar
    assert grammar is not None and grammar.kind == "ebnf" and '"null"' in grammar.text
    grammar = carried(api, tools=[F], tool_choice="none", response_format=form).grammar
    assert grammar is not None and grammar.kind == "json_schema"
    assert carried(api, tools=[F], response_format={"type": "json_object"}).grammar is not None
    for fields, param in (
        ({"regex": "a+"}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
    ):
        answer = api.chat(tools=[F], **fields)
        assert answer.status == 400 and answer.error["param"] == param


def test_several_forced_calls_are_asked_for(api: Api) -> None:
    texts = []
    for fields in ({}, {"parallel_tool_calls": False}, {"parallel_tool_calls": True}):
        grammar = carried(api, tools=[PING], tool_choice="required", **fields).grammar
        assert grammar is not None
        texts.append(grammar.text)
    assert texts[0] == texts[1] != texts[2]


def test_grammars_begin_behind_the_reasoning(thinking: Api) -> None:
    close = tuple(thinking.served.tokenizer.encode("</think>", add_special_tokens=False))
    for fields in ({"regex": "a+"}, {"tools": [F], "tool_choice": "required"}):
        grammar = carried(thinking, **fields).grammar
        assert grammar is not None and grammar.after == close
        grammar = carried(thinking, **fields, chat_template_kwargs={"enable_thinking": False}).grammar
        assert grammar is not None and grammar.after == ()
    bound = carried(thinking, thinking_token_budget=7).thinking
    assert bound == Thinking(budget=7, end=close)
    assert carried(thinking, max_thinking_tokens=7, reasoning_effort="none").thinking is None


def test_a_model_that_opens_its_reasoning_finds_it_opened() -> None:
    with Api(formats=Formats(reasoning="think", native=True)) as api:
        words = api.served.tokenizer

        def prompt(**fields: Any) -> tuple[str, Request]:
            request = carried(api, **fields)
            return words.decode(request.tokens, skip_special_tokens=False), request

        text, request = prompt()
        assert text.endswith("assistant\n") and request.text.parsing == Parsing(reasoning="think")
        for fields in ({"regex": "a+"}, {"thinking_budget": 3}):
            text, request = prompt(**fields)
            assert text.endswith("assistant\n<think>\n")
            assert request.text.parsing == Parsing(reasoning="think", thinking=True)
            assert prompt(**fields, chat_template_kwargs={"enable_thinking": False})[0].endswith("<quick>")
    with Api(formats=Formats(reasoning="think")) as api:  # the operator says so, the template knows nothing of it
        request = carried(api, regex="a+", thinking_budget=3)
        assert request.grammar is not None and request.grammar.after == () and request.thinking is None


def test_channels_carry_the_reasoning_themselves() -> None:
    with Api(formats=choose("<|channel|>analysis<|message|> functions.")) as api:
        words = api.served.tokenizer
        final = "<|channel|>final<|message|>"
        request = carried(api, regex="a+", thinking_budget=3)
        assert request.grammar is not None and request.thinking is not None
        assert words.decode(list(request.grammar.after)) == final
        assert words.decode(list(request.thinking.end)) == "<|end|><|start|>assistant" + final
        request = carried(api, tools=[F], tool_choice="required")
        assert request.grammar is not None and request.grammar.after == () and "analysis" in request.grammar.text


def test_tools_may_be_turned_off() -> None:
    with Api(formats=choose("", "none")) as api:
        api.engine.script = CALL
        assert api.chat(tools=[F], max_tokens=200).json["choices"][0]["message"]["content"] == CALL
        assert api.chat(tools=[F], tool_choice="required").error["param"] == "tool_choice"


# ---- texts made elsewhere


def test_parse_function_call(api: Api) -> None:
    body: Json = {"text": f"so {CALL}", "tools": [F, PING]}
    call = {"tool_index": 0, "name": "f", "parameters": '{"a": 1}'}
    assert api.post("/parse_function_call", body).json == {"normal_text": "so", "calls": [call]}
    text = '[TOOL_CALLS]f[ARGS]{"a": 1}'
    for name in ("mistral", "hermes"):
        answer = api.post("/parse_function_call", {"text": text, "tools": [F], "tool_call_parser": name}).json
        assert (answer["calls"] == [call]) is (name == "mistral")
    for wrong in ({}, {"text": "x", "tool_call_parser": "nope"}, {"text": "x", "tools": [{}]}, {"text": 1}):
        assert api.post("/parse_function_call", wrong).status == 400


def test_separate_reasoning(api: Api) -> None:
    body = {"text": "<think>a</think>b", "reasoning_parser": "deepseek-r1"}
    assert api.post("/separate_reasoning", body).json == {"reasoning_text": "a", "text": "b"}
    body = {"text": "a</think>b", "reasoning_parser": "qwen3", "thinking": True}
    assert api.post("/separate_reasoning", body).json == {"reasoning_text": "a", "text": "b"}
    assert api.post("/separate_reasoning", {"text": "x"}).json == {"reasoning_text": "", "text": "x"}
    for wrong in ({}, {"text": "x", "reasoning_parser": "nope"}):
        assert api.post("/separate_reasoning", wrong).status == 400
