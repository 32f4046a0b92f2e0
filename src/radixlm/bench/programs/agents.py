"""This module owns the workloads of agents: ReAct and generative agents by their structure."""

from __future__ import annotations

from typing import Any

from radixlm.bench.programs.workload import Size, Words, Workload
from radixlm.lang import function, gen


@function
def react(s: Any, instructions: str, question: str, observations: list[str]) -> None:
    s += instructions + "\nQuestion: " + question + "\n"
    for step, observation in enumerate(observations, 1):
        s += f"Thought {step}:" + gen(f"thought{step}", max_tokens=20)
        s += f"\nAction {step}:" + gen(f"action{step}", max_tokens=6)
        s += f"\nObservation {step}: " + observation + "\n"
    s += "Answer:" + gen("answer", max_tokens=8)


@function
def event(s: Any, template: str, person: str, happening: str) -> None:
    s += template + "\nName and traits: " + person + "\nWhat happens: " + happening + "\nAnswer:"
    s += gen("answer", max_tokens=12)


def react_agents(words: Words, size: Size) -> Workload:
    """Instructions and examples, then thoughts, actions and what came of them; every call has all before it."""
    head = f"Solve a task in steps of thought, action and observation.\n{words.text(500)}"
    items = [
        {"instructions": head, "question": words.text(16), "observations": words.texts(4, 50)}
        for _ in range(size.count(12))
    ]
    return Workload("react", "ReAct agents: four steps with an observation each", react, items)


def generative_agents(words: Words, size: Size) -> Workload:
    """Four kinds of question about many events; people come again."""
    templates = [f"Task {i}: {words.text(300)}" for i in range(4)]
    people = words.texts(6, 30)
    items = [
        {
            "template": words.random.choice(templates),
            "person": words.random.choice(people),
            "happening": words.text(24),
        }
        for _ in range(size.count(40))
    ]
    return Workload("generative-agents", "generative agents: short answers about events, four templates", event, items)
