"""An agent with tools: `python examples/agent.py "How much is 17 * 23?"`.

The model chooses a tool by `select`, so that it cannot name one that does not exist.
"""

from __future__ import annotations

import ast
import datetime
import operator
import sys
from collections.abc import Callable
from typing import Any

import radixlm as rl

SIGNS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def calculate(text: str) -> str:
    """A sum of numbers. Nothing else is evaluated."""

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
            return SIGNS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only + - * / of numbers")

    try:
        return f"{value(ast.parse(text.strip(), mode='eval').body):g}"
    except (ValueError, SyntaxError, ZeroDivisionError) as error:
        return f"that cannot be calculated: {error}"


TOOLS = {"calculate": calculate, "today": lambda text: datetime.date.today().isoformat()}


@rl.function
def agent(s: Any, question: str, steps: int = 2) -> Any:
    s += "Answer questions with the help of tools: calculate (numbers), today (the date), finish (the answer).\n"
    s += "Question: How much is 2 + 3?\nAction: calculate\nInput: 2 + 3\nResult: 5\nAction: finish\nInput: 5\n\n"
    s += "Question: " + question + "\n"
    for _ in range(steps):
        s += "Action: " + rl.select("tool", [*TOOLS, "finish"]) + "\nInput:" + rl.gen("input", max_tokens=24, stop="\n")
        if s["tool"] == "finish":
            return s["input"].strip()
        s += "\nResult: " + TOOLS[s["tool"]](s["input"]) + "\n"
    s += "Action: finish\nInput:" + rl.gen("input", max_tokens=24, stop="\n")
    return s["input"].strip()


if __name__ == "__main__":
    with rl.Engine(model="smollm2") as engine:
        print(agent.run(" ".join(sys.argv[1:]) or "How much is 17 * 23?", backend=engine, temperature=0).text())
