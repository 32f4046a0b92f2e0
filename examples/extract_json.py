"""JSON out of many texts: `python examples/extract_json.py`. The program writes the keys, the model the values, so that
what comes out can always be read; examples and keys are computed once for all texts.
"""

from __future__ import annotations

import json
from typing import Any

import radixlm as rl

TEXTS = [
    "Marie Curie was born in Warsaw in 1867 and worked in Paris.",
    "Ada Lovelace, born in London in 1815, wrote the first program.",
    "Alan Turing was born in London in 1912.",
]


@rl.function
def extract(s: Any, text: str) -> Any:
    s += "Extract who it is about.\n\nText: Isaac Newton was born in Woolsthorpe in 1642.\n"
    s += 'JSON: {"name": "Isaac Newton", "place": "Woolsthorpe", "century": "17th"}\n\n'
    s += "Text: " + text + "\nJSON: "
    with s.var_scope("json"):
        for i, key in enumerate(("name", "place")):
            s += f'{", " if i else "{"}"{key}": "' + rl.gen(key, max_tokens=16, stop=['"', "\n"]) + '"'
        s += ', "century": "' + rl.select("century", ["17th", "18th", "19th", "20th"]) + '"}'
    return parsed(s["json"])


def parsed(text: str) -> dict[str, str]:
    try:
        return dict(json.loads(text))
    except json.JSONDecodeError:  # a value with a stray backslash
        return dict(json.loads(text.replace("\\", "")))


if __name__ == "__main__":
    with rl.Engine(model="smollm2") as engine:
        states = extract.run_batch([{"text": text} for text in TEXTS], backend=engine, temperature=0, progress_bar=True)
        for state in states:
            print(state.ret_value)
