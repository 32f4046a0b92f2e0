"""Tree of thought: `python examples/tree_of_thought.py`. Several first steps, several second ones for each, and the
path that the model thinks most of. All branches are computed together, and what they share is computed once.
"""

from __future__ import annotations

from typing import Any

import radixlm as rl

GRADES = [" bad", " fair", " good"]


@rl.function
def solve(s: Any, question: str, branches: int = 3, depth: int = 2) -> Any:
    s += rl.user(f"Solve this step by step, one sentence for each step. {question}")
    s += rl.assistant_begin()
    level = [s]
    for step in range(depth):
        grown = []
        for state in level:
            forks = state.fork(branches)
            forks += lambda i, step=step: f"Step {step + 1}:" + rl.gen("step", max_tokens=32, stop="\n", seed=i) + "\n"
            grown += list(forks)
        for state in grown:
            with state.copy() as judge:  # the grade is no part of the path
                judge += "This way is" + rl.select("grade", GRADES)
                state["grade"] = judge["grade"]
        level = sorted(grown, key=lambda state: -GRADES.index(state["grade"]))[:branches]
    best = level[0]
    best += "The answer is" + rl.gen("answer", max_tokens=16, stop=["\n", "."])
    return best["answer"].strip(), best.messages()[-1]["content"]


if __name__ == "__main__":
    with rl.Engine(model="smollm2") as engine:
        task = "Anna has 3 boxes with 4 pens each and gives away 5 pens. How many are left?"
        answer, path = solve.run(task, backend=engine, temperature=0.7).ret_value
        print(f"{path}\n\nanswer: {answer}")
