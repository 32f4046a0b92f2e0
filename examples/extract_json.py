"""JSON out of many texts: `python examples/extract_json.py`. A schema holds the model to it, so that what comes out can
always be read; the instructions are computed once for all texts.
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
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "place": {"type": "string", "maxLength": 40},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "century": {"enum": ["18th", "19th", "20th"]},
    },
    "required": ["name", "place", "born", "century"],
    "additionalProperties": False,
}


@rl.function
def extract(s: Any, text: str) -> Any:
    s += rl.system("You extract facts as JSON with the keys name, place, born and century.")
    s += rl.user(text)
    s += rl.assistant(rl.gen("json", max_tokens=128, json_schema=SCHEMA))
    return json.loads(s["json"])


if __name__ == "__main__":
    with rl.Engine(model="smollm2") as engine:
        states = extract.run_batch([{"text": text} for text in TEXTS], backend=engine, temperature=0, progress_bar=True)
        for state in states:
            print(state.ret_value)
