"""radixlm serves language models: every request reuses the KV cache of every earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixlm.config.schema import Config as Config
    from radixlm.llm import Engine as Engine

__version__ = "0.1.0"
__all__ = ["Config", "Engine", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazily: the package is imported by every process, and only those that run a model need torch.
    if name == "Engine":
        from radixlm.llm import Engine

        return Engine
    if name == "Config":
        from radixlm.config.schema import Config

        return Config
    raise AttributeError(f"module 'radixlm' has no attribute {name!r}")
