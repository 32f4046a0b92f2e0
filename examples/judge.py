"""A judge that looks at an essay from several sides at once, then gives one verdict: `python examples/judge.py`."""

from __future__ import annotations

from typing import Any

import radixlm as rl

SIDES = ("clarity", "originality", "evidence")
ESSAY = """Cities should plant more trees. Trees give shade, and shade saves energy in summer. In our street the council
planted ten lindens, and since then people sit outside again. A tree costs little and lives long."""


@rl.function
def judge(s: Any, essay: str) -> Any:
    s += rl.system("You judge essays.")
    s += rl.user("Here is an essay:\n" + essay)
    sides = s.fork(len(SIDES))
    for name, side in zip(SIDES, sides, strict=True):
        side += rl.user(f"Judge its {name} in one sentence.") + rl.assistant(rl.gen("judgement", max_tokens=48))
    sides.join()
    opinions = "\n".join(f"{name}: {text}" for name, text in zip(SIDES, s["judgement"], strict=True))
    s += rl.user(f"These are the opinions:\n{opinions}\nGive your verdict.")
    s += rl.assistant("The essay is" + rl.select("verdict", [" weak", " fair", " strong"]) + ", for" + rl.gen("reason"))
    return {"verdict": s["verdict"].strip(), "reason": s["reason"].strip(), "opinions": opinions}


if __name__ == "__main__":
    with rl.Engine(model="smollm2") as engine:
        for name, text in judge.run(ESSAY, backend=engine, temperature=0, max_new_tokens=48).ret_value.items():
            print(f"{name}: {text}")
