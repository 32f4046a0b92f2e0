"""The examples run, say what they promise, and are short."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from radixlm import Engine
from support.programs import null_engine

EXAMPLES = Path(__file__).parents[2] / "examples"
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with null_engine() as engine:
        yield engine


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_they_are_short_and_all_tested() -> None:
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    source = Path(__file__).read_text()
    for name in names:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60, name
        assert f'load("{name}")' in source, f"no test of {name}"


def test_chat(engine: Engine) -> None:
    said: list[str] = []
    words = iter(["Hello, who are you?", "And what can you do?", ""])
    state = load("chat").chat.run(ask=lambda: next(words), say=said.append, backend=engine, **GREEDY)
    assert [m["role"] for m in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert len(said) == 4 and "prompt tokens were cached" in said[3] and not said[3].startswith("[0 ")


def test_agent(engine: Engine) -> None:
    example = load("agent")
    assert example.calculate(" 17 * 23 ") == "391"
    assert example.calculate("__import__('os')").startswith("that cannot be calculated")
    state = example.agent.run("How much is 17 * 23?", backend=engine, **GREEDY)
    assert state["tool"] in (*example.TOOLS, "finish") and state.ret_value == state["input"].strip()


def test_tree_of_thought(engine: Engine) -> None:
    answer, path = load("tree_of_thought").solve.run("How many?", backend=engine, temperature=0.7).ret_value
    assert path.index("Step 1:") < path.index("\nStep 2:") < path.index("\nThe answer is")
    assert answer in path


def test_judge(engine: Engine) -> None:
    example = load("judge")
    found = example.judge.run(example.ESSAY, backend=engine, **GREEDY).ret_value
    assert found["verdict"] in ("weak", "fair", "strong") and found["opinions"].count(": ") >= 3


def test_extract_json(engine: Engine) -> None:
    example = load("extract_json")
    for state in example.extract.run_batch([{"text": text} for text in example.TEXTS], backend=engine, temperature=0):
        found = state.ret_value
        assert list(found) == example.SCHEMA["required"] and 1000 <= found["born"] <= 2100
        assert found["century"] in ("18th", "19th", "20th")


def test_summarise(engine: Engine) -> None:
    example = load("summarise")
    text = "\n\n".join(f"Paragraph {i} tells of something. " * 20 for i in range(8))
    assert " ".join(example.parts(text)).split() == text.split()
    state = example.summarise.run(text, backend=engine, **GREEDY)
    assert len(state["summary"]) == len(example.parts(text)) > 1 and state.ret_value == state["whole"]


def test_web_stream(engine: Engine) -> None:
    example = load("web_stream")
    whole = example.poem.run("rivers", backend=engine, temperature=0)["poem"]

    async def ask() -> list[str]:
        transport = httpx.ASGITransport(app=example.make_app(engine))
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
            client.stream("GET", "/", params={"topic": "rivers"}) as response,
        ):
            assert response.headers["content-type"] == "text/plain; charset=utf-8"
            return [piece async for piece in response.aiter_text()]

    assert "".join(asyncio.run(ask())) == whole
