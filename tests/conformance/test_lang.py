"""One program on every backend: the engine in this process, a server, and a server through OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import radixlm as rl
from radixlm import Engine
from support import tiny
from support.live import Server
from support.words import encode

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    server = Server(model, "--max-total-tokens", "32768", name="tiny")
    yield server
    server.check_well()
    server.stop()


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(model=str(model), max_total_tokens=32768, threads=1) as engine:
        yield engine


@rl.function
def essay(s: Any, topic: str) -> Any:
    s += "An essay with three parts, each of which was written by somebody else. Topic: " + topic + "\nPlan:"
    s += rl.gen("plan")
    forks = s.fork(3)
    forks += lambda i: f"\nPart {i}:" + rl.gen("part", stop=["x", "\n"])
    forks.join()
    s += "\nMark:" + rl.gen("mark", max_tokens=2)
    return s["part"]


@rl.function
def talk(s: Any, words: str) -> None:
    s += rl.system("You are kind.")
    s += rl.user(words)
    s += rl.assistant(rl.gen("first"))
    s += rl.user("And then?")
    s += rl.assistant(rl.gen("second", max_tokens=9))


@rl.function
def dictated(s: Any) -> None:
    s += rl.user("Where?")
    s += rl.assistant("In the town of" + rl.gen("town") + ", as I said," + rl.gen("more"))
    s += rl.user("Who?")
    with s.assistant():
        s += "It was" + rl.select("who", [" the king", " his servant", " nobody at all"])


@pytest.mark.parametrize(("program", "arguments"), [(essay, ("cats",)), (talk, ("hello",)), (dictated, ())])
def test_a_server_does_what_the_engine_does(engine: Engine, server: Server, program: Any, arguments: Any) -> None:
    here = program.run(*arguments, backend=engine, **GREEDY)
    there = program.run(*arguments, backend=server.url, **GREEDY)
    assert there.text() == here.text() and there.ret_value == here.ret_value
    assert there.messages() == here.messages()
    stream = program.run(*arguments, backend=server.url, stream=True, **GREEDY)
    assert "".join(stream.text_iter()) == here.text()


@pytest.mark.parametrize(("program", "arguments"), [(essay, ("cats",)), (talk, ("hello",))])
def test_openai_does_what_the_engine_does(engine: Engine, server: Server, program: Any, arguments: Any) -> None:
    here = program.run(*arguments, backend=engine, **GREEDY)
    backend = rl.OpenAI(url=f"{server.url}/v1")
    there = program.run(*arguments, backend=backend, **GREEDY)
    names = ("plan", "part", "mark") if program is essay else ("first", "second")
    assert {name: there[name] for name in names} == {name: here[name] for name in names}
    assert there.messages() == here.messages()
    stream = program.run(*arguments, backend=backend, stream=True, **GREEDY)
    assert "".join(stream.text_iter(names[0])) == here[names[0]]
    meta = there.get_meta_info(names[0])
    assert meta["completion_tokens"] == 6 and meta["finish_reason"] == {"type": "length"}


def test_a_chat_of_a_program_and_of_the_route_are_one(engine: Engine, server: Server) -> None:
    """The same answers, and the same tokens: what one computed is a hit for the other."""
    state = talk.run("Tell me of the sea and of the ships.", backend=server.url, **GREEDY)
    server.flush()
    messages = state.messages()
    answer = server.chat(messages=messages[:2], max_tokens=6)
    assert answer["choices"][0]["message"]["content"] == state["first"]
    again = talk.run("Tell me of the sea and of the ships.", backend=server.url, **GREEDY)
    meta = again.get_meta_info("first")
    assert meta["cached_tokens"] == meta["prompt_tokens"] - 1 == answer["usage"]["prompt_tokens"] - 1


def test_openai_refuses_what_it_cannot_do(server: Server) -> None:
    plain, extended = (rl.OpenAI(url=server.url, extensions=more) for more in (False, True))
    with pytest.raises(rl.ProgramError, match="cannot do select"):
        dictated.run(backend=plain, **GREEDY)["who"]
    with pytest.raises(rl.ProgramError, match="has no parameter like top_k"):
        talk.run("hello", backend=plain, top_k=3)

    @rl.function
    def begun(s: Any) -> None:
        s += rl.user("Where?")
        s += rl.assistant("In the town of" + rl.gen("town"))

    with pytest.raises(rl.ProgramError, match="cannot continue a message that is begun"):
        begun.run(backend=plain, **GREEDY)["town"]
    native = begun.run(backend=server.url, top_k=1, **GREEDY)
    assert begun.run(backend=extended, top_k=1, **GREEDY)["town"] == native["town"]


def test_grammars_hold_everywhere(engine: Engine, server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}

    @rl.function
    def form(s: Any) -> None:
        s += rl.user("A number, please.")
        s += rl.assistant(rl.gen("json", json_schema=schema, max_tokens=24))
        s += rl.user("And another.")
        s += rl.assistant(rl.gen("number", regex="[0-9]{1,3}"))

    here = form.run(backend=engine, **GREEDY)
    assert json.loads(here["json"])["a"] in (1, 2) and here["number"].isdigit()
    for backend in (server.url, rl.OpenAI(url=server.url, extensions=True)):
        there = form.run(backend=backend, **GREEDY)
        assert (there["json"], there["number"]) == (here["json"], here["number"])

    @rl.function
    def broken(s: Any) -> None:
        s += "a" + rl.gen("x", regex="(")

    error = broken.run(backend=server.url).error()
    assert error is not None and error.status == 400 and error.where.startswith(__file__)


def test_a_model_that_can_talk(real: Server) -> None:
    """Turns share all tokens before them, the model's own words included; the likeliest choice is the right one."""

    @rl.function
    def tour(s: Any) -> None:
        s += rl.user("What is the capital of France?")
        s += rl.assistant(rl.gen("first", max_tokens=32))
        s += rl.user("And of Italy?")
        s += rl.assistant("It is" + rl.select("city", [" Oslo", " Rome", " Tokyo"]) + rl.gen("rest", max_tokens=8))

    state = tour.run(backend=real.url, temperature=0)
    assert "Paris" in state["first"] and state["city"] == " Rome"
    first, rest = state.get_meta_info("first"), state.get_meta_info("rest")
    said = first["prompt_tokens"] + first["completion_tokens"]
    assert rest["cached_tokens"] >= said - 2
    answer = real.chat(messages=state.messages()[:1], max_tokens=32)
    assert answer["choices"][0]["message"]["content"] == state["first"]


def record(fields: str, period: int = tiny.PERIOD) -> str:
    """A text of exactly one period of the repeater."""
    text = fields
    while len(encode(text + "\n")) < period:
        text += " x"
    assert len(encode(text + "\n")) == period
    return text + "\n"


def make_form(ahead: int | None) -> Any:
    @rl.function(num_api_spec_tokens=ahead)
    def form(s: Any, shown: str, second: str) -> None:
        s += shown
        s += "Name:" + rl.gen("name", stop="\n") + "\nAge:" + rl.gen("age", stop="\n")
        s += f"\n{second}:" + rl.gen("city", stop="\n")

    return form


@pytest.mark.parametrize(("second", "calls"), [("City", 1), ("Town", 2)])
def test_a_completion_ahead_serves_several(repeater: Server, second: str, calls: int) -> None:
    """As long as the program's own text is what the model wrote, and with the texts that single calls give."""
    shown = record("Name: Bob Smith\nAge: 47\nCity: Rome\n")
    backend = rl.OpenAI(url=repeater.url)
    found = {}
    for ahead in (None, 48):
        before = repeater.figures()
        found[ahead] = make_form(ahead).run(shown, second, backend=backend, temperature=0, max_new_tokens=16)
        assert found[ahead].error() is None
        after = repeater.figures()
        made = sum(after[name] - before[name] for name in ("finished_stop", "finished_length"))
        assert made == (calls if ahead else 3)
    assert found[48]["name"] == found[None]["name"] == " Bob Smith"
    assert found[48]["age"] == found[None]["age"] == " 47"
    assert found[48].text() == found[None].text()
    assert found[48].get_meta_info("age") == {"ahead": True}


def test_servers_that_are_not_there() -> None:
    state = talk.run("hello", backend="http://127.0.0.1:9", **GREEDY)
    with pytest.raises(rl.ProgramError, match=r"test_lang.py:\d+: cannot reach http://127.0.0.1:9") as caught:
        state.text()
    assert caught.value.status == 503
