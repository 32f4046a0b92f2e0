"""The front-end language: programs that call a model many times, in ordinary Python.

@radixlm.function
def answer(s, question):
    s += radixlm.user(question)
    s += radixlm.assistant(radixlm.gen("answer", max_tokens=64))

with radixlm.Engine(model="smollm2") as engine:
    print(answer.run("Which gas do plants breathe in?", backend=engine)["answer"])
"""

from __future__ import annotations

from radixlm.lang.backends.anthropic import Anthropic
from radixlm.lang.backends.base import Scheduling
from radixlm.lang.backends.openai import OpenAI
from radixlm.lang.backends.server import RuntimeEndpoint
from radixlm.lang.errors import ProgramError, TraceError
from radixlm.lang.group import ForkGroup
from radixlm.lang.home import flush_cache, get_server_info, set_default_backend
from radixlm.lang.primitives import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from radixlm.lang.program import Function, function
from radixlm.lang.state import ProgramState

__all__ = [
    "Anthropic", "ForkGroup", "Function", "OpenAI", "ProgramError", "ProgramState", "RuntimeEndpoint", "Scheduling",
    "TraceError", "assistant", "assistant_begin", "assistant_end", "flush_cache", "function", "gen", "gen_int",
    "gen_string", "get_server_info", "image", "select", "separate_reasoning", "set_default_backend", "system",
    "system_begin", "system_end", "user", "user_begin", "user_end",
]  # fmt: skip
