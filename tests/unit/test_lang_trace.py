"""Programs as graphs: the same results as calling the function, the prefix they begin with, and their pictures."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any

import pytest

import radixlm as rl
from radixlm import Engine
from support.programs import Held, null_engine

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with null_engine() as engine:
        yield engine


def write(s: Any, rng: random.Random, argument: Any, depth: int) -> None:
    """Anything that a program without decisions may do."""
    for _ in range(rng.randrange(2, 6)):
        deed = rng.choice(["text", "gen", "select", "argument", "read", "scope", "fork", "copy", "set"])
        name = rng.choice("abc")
        if deed == "text":
            s += f"word {rng.randrange(9)} "
        elif deed == "gen":
            s += " " + rl.gen(name)
        elif deed == "select":
            s += rl.select(name, [" one", " two three", " four"])
        elif deed == "argument":
            s += argument + " "
        elif deed == "read" and name in s:
            s += "again: " + s[name]
        elif deed == "set" and name in s:
            s["d"] = [s[name], "x"]
        elif deed == "scope":
            with s.var_scope("scoped"):
                s += "within" + rl.gen(name)
        elif deed == "copy":
            with s.copy() as other:
                other += " aside" + rl.gen(name)
                s += other[name]
        elif deed == "fork" and depth < 2:
            forks = s.fork(rng.randrange(1, 4))
            for fork in forks:
                fork += "branch "
                write(fork, rng, argument, depth + 1)
            forks.join(rng.choice(["gather_variable", "concate_and_append"]))
            for letter in "abcd":  # lists by now
                s[letter] = "no list"


@pytest.mark.parametrize("seed", range(25))
def test_a_compiled_program_does_what_the_function_does(engine: Engine, seed: int) -> None:
    @rl.function
    def program(s: Any, argument: Any) -> Any:
        s += "Start "
        write(s, random.Random(seed), argument, 0)
        s += rl.gen("last")
        return {"last": s["last"], "given": [argument, 3]}

    run = program.run("an argument", backend=engine, **GREEDY)
    compiled = program.compile(engine)
    replay = compiled.run("an argument", **GREEDY)
    stream = compiled.run(argument="an argument", stream=True, **GREEDY)
    assert run.error() is None and replay.text() == run.text()
    assert "".join(stream.text_iter()) == run.text()
    names = [name for name in ("a", "b", "c", "d", "scoped", "last") if name in run]
    assert {name: replay[name] for name in names} == {name: run[name] for name in names}
    assert replay.ret_value == run.ret_value == {"last": run["last"], "given": ["an argument", 3]}
    batch = compiled.run_batch([{"argument": "an argument"}, {"argument": "another"}], **GREEDY)
    assert batch[0].text() == run.text() and batch[1].text() == program.run("another", backend=engine, **GREEDY).text()
    graph = compiled.graph
    assert all(before < node.number for node in graph.nodes for before in node.waits)


@rl.function
def chat(s: Any, shots: str, question: str) -> None:
    s += rl.system("You answer questions about history in one word, and you never explain yourself.")
    s += rl.user("Examples: " + shots)
    s += rl.assistant("Yes.")
    s += rl.user(question)
    s += rl.assistant(rl.gen("answer"))


def test_the_prefix_of_all_runs(engine: Engine) -> None:
    prefix = chat.trace().prefix()
    assert [m.role for m in prefix.messages] == ["system"] and prefix.open is not None
    assert prefix.open.text == "Examples: "
    bound = chat.bind(shots="many").trace().prefix()
    assert [m.role for m in bound.messages] == ["system", "user", "assistant"]
    text = chat.bind(shots="many").cache(engine)
    state = chat.run("many", "When?", backend=engine, **GREEDY)
    assert state.text().startswith(text) and text.endswith("<|im_start|>user\n")
    assert state.get_meta_info("answer")["cached_tokens"] >= len(engine.encode(text)) - 1


def test_tracing_for_the_prefix_calls_nothing_behind_it() -> None:
    called: list[str] = []

    @rl.function
    def program(s: Any, question: str) -> None:
        s += "constant " * 20
        called.append("before")
        s += question
        called.append("after")
        s += rl.gen("x")

    backend = Held()
    assert program.cache(backend) == "constant " * 20 and called == ["before"]
    assert [prompt.text for prompt in backend.prefilled] == ["constant " * 20]


def test_pictures(engine: Engine) -> None:
    @rl.function
    def tree(s: Any, topic: str) -> None:
        s += "A <b>constant</b> & more.\n" + topic
        forks = s.fork(3)
        forks += lambda i: f"thought {i}:" + rl.gen("thought")
        forks.join()
        s += "Best:" + rl.select("best", ["a", "b"])

    graph = tree.trace()
    text = graph.text()
    lines = text.splitlines()
    assert lines[0] == "tree: 12 nodes, 4 calls, 4 states" and len(lines) == 1 + len(graph.nodes)
    assert lines[1].endswith("(every run)") and "(every state of the fork)" in lines[2]
    assert sum("gen thought" in line for line in lines) == 3 and any("join 3 (gather)" in line for line in lines)
    root = ElementTree.fromstring(graph.svg)
    assert len(root.findall(".//{http://www.w3.org/2000/svg}title")) == len(graph.nodes)
    assert len(root.findall(".//{http://www.w3.org/2000/svg}path")) == sum(len(node.waits) for node in graph.nodes)
    assert sum("#cfe8cf" in (one.get("fill") or "") for one in root.iter()) == 2  # one node and the legend


def test_failures_of_a_graph_have_their_line() -> None:
    from radixlm.base.errors import Unavailable
    from radixlm.lang.home import home

    backend = Held(fail=Unavailable("gone"))
    home().call(backend.open.set)

    @rl.function
    def program(s: Any) -> Any:
        s += "a" + rl.gen("x")
        return s["x"]

    state = program.compile(backend).run()
    for use in (lambda: state["x"], lambda: state.ret_value, state.text):
        with pytest.raises(rl.ProgramError, match=r"test_lang_trace.py:\d+: gone"):
            use()
