"""This module owns the workloads that branch: tree of thought, skeleton of thought, and a judge."""

from __future__ import annotations

from typing import Any

from radixlm.bench.programs.workload import Size, Words, Workload
from radixlm.lang import function, gen

BRANCHES, DEPTH = 2, 3
DIMENSIONS = ("clarity", "originality", "evidence", "structure")


@function
def tree_of_thought(s: Any, instructions: str, question: str) -> None:
    s += instructions + "\nQuestion: " + question + "\n"
    level = [s]
    for depth in range(DEPTH):
        grown = []
        for state in level:
            forks = state.fork(BRANCHES)
            forks += lambda i, depth=depth: _thought(depth, i)
            grown += list(forks)
        level = grown
    for state in level:
        state += "\nWorth, out of ten:" + gen("worth", max_tokens=2)
    s["worth"] = [state["worth"] for state in level]


def _thought(depth: int, branch: int) -> Any:
    return f"\nStep {depth + 1}, idea {branch + 1}:" + gen(f"thought{depth}", max_tokens=20)


@function
def skeleton_of_thought(s: Any, instructions: str, topic: str) -> None:
    s += instructions + "\nTopic: " + topic + "\nSkeleton:" + gen("skeleton", max_tokens=28)
    forks = s.fork(4)
    forks += lambda i: f"\nPoint {i + 1}, in full:" + gen("point", max_tokens=28)
    forks.join()
    s += "\nAll together: " + "\n".join(s["point"])
    s += "\nIn one line:" + gen("summary", max_tokens=16)


@function
def judge(s: Any, instructions: str, essay: str) -> None:
    s += instructions + "\nEssay: " + essay + "\n"
    forks = s.fork(len(DIMENSIONS))
    forks += lambda i: f"Judgement of its {DIMENSIONS[i]}:" + gen("judgement", max_tokens=28)
    forks.join()
    s += "".join(f"{name}: {text}\n" for name, text in zip(DIMENSIONS, s["judgement"], strict=True))
    s += "Verdict:" + gen("verdict", max_tokens=16) + "\nGrade:" + gen("grade", max_tokens=1)


def tree(words: Words, size: Size) -> Workload:
    head = f"Solve it step by step, in several ways.\n{words.text(200)}"
    items = [{"instructions": head, "question": words.text(50)} for _ in range(size.count(6))]
    about = f"tree of thought: {BRANCHES} branches, {DEPTH} deep, and a mark for each leaf"
    return Workload("tree-of-thought", about, tree_of_thought, items)


def skeleton(words: Words, size: Size) -> Workload:
    head = f"Give tips: a skeleton first, then its points.\n{words.text(120)}"
    items = [{"instructions": head, "topic": words.text(20)} for _ in range(size.count(8))]
    return Workload("skeleton-of-thought", "skeleton of thought: four points at once", skeleton_of_thought, items)


def llm_judge(words: Words, size: Size) -> Workload:
    head = f"Judge an essay by several measures, then merge.\n{words.text(120)}"
    items = [{"instructions": head, "essay": words.text(500)} for _ in range(size.count(8))]
    return Workload("judge", "judge: branch, solve, merge over four measures", judge, items)
