"""radixlm serves language models: every request reuses the KV cache of every earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixlm import lang as lang
    from radixlm.config.schema import Config as Config
    from radixlm.lang import assistant as assistant
    from radixlm.lang import function as function
    from radixlm.lang import gen as gen
    from radixlm.lang import gen_int as gen_int
    from radixlm.lang import gen_string as gen_string
    from radixlm.lang import image as image
    from radixlm.lang import select as select
    from radixlm.lang import separate_reasoning as separate_reasoning
    from radixlm.lang import set_default_backend as set_default_backend
    from radixlm.lang import system as system
    from radixlm.lang import user as user
    from radixlm.llm import Engine as Engine

__version__ = "0.1.0"

#: Words of the front-end language (`radixlm.lang`) that are at hand here as well.
_WORDS = (
    "Anthropic", "Function", "OpenAI", "ProgramError", "ProgramState", "RuntimeEndpoint", "assistant",
    "assistant_begin", "assistant_end", "flush_cache", "function", "gen", "gen_int", "gen_string", "get_server_info",
    "image", "select", "separate_reasoning", "set_default_backend", "system", "system_begin", "system_end", "user",
    "user_begin", "user_end",
)  # fmt: skip

__all__ = ["Config", "Engine", "__version__", *_WORDS]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    # Lazily: the package is imported by every process, and only those that run a model need torch.
    if name == "Engine":
        from radixlm.llm import Engine

        return Engine
    if name == "Config":
        from radixlm.config.schema import Config

        return Config
    if name == "lang" or name in _WORDS:
        import importlib

        lang = importlib.import_module("radixlm.lang")
        return lang if name == "lang" else getattr(lang, name)
    raise AttributeError(f"module 'radixlm' has no attribute {name!r}")
