"""This module owns the shape of the configuration: one frozen dataclass per owner, each field with help and names.

The command line, the environment twins (`RADIXLM_<FLAG>`), the YAML keys and the reference in the docs are generated
from these fields. The field's name is the canonical flag (`chunked_prefill_size` -> `--chunked-prefill-size`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

#: Short names of data types that people type.
DTYPES = (
    ("half", "float16"),
    ("fp16", "float16"),
    ("bf16", "bfloat16"),
    ("float", "float32"),
    ("fp32", "float32"),
)


def option(
    default: Any,
    help: str,
    *,
    names: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    aliases: tuple[tuple[str, str], ...] = (),
    low: float | None = None,
    high: float | None = None,
    secret: bool = False,
    shown: str = "",
) -> Any:
    """A configurable field.

    Args:
        help: one line for the reader of `--help`.
        names: further flag names without dashes in front (synonyms users know from other servers).
        choices: the values allowed, if they are few.
        aliases: (spelling, choice) pairs that are accepted beside `choices`.
        low, high: the range of a number, both ends included.
        secret: never printed.
        shown: what help prints for the default when the default (None) is derived.
    """
    metadata = {
        "help": help,
        "names": names,
        "choices": choices,
        "aliases": aliases,
        "low": low,
        "high": high,
        "secret": secret,
        "shown": shown,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model: str = option(
        "smollm2",
        "model to serve: a directory, a GGUF file, a hub id, or the short name of a packaged model",
        names=("model-path", "m"),
    )
    tokenizer_path: str | None = option(
        None, "directory or tokenizer.json of the tokenizer", names=("tokenizer",), shown="the model's"
    )
    revision: str | None = option(None, "branch, tag or commit of a hub model", shown="main")
    load_format: str = option(
        "auto", "where weights come from; dummy makes random ones", choices=("auto", "safetensors", "gguf", "dummy")
    )
    dtype: str = option(
        "auto",
        "data type of weights and activations",
        choices=("auto", "float32", "bfloat16", "float16"),
        aliases=DTYPES,
    )
    context_length: int | None = option(
        None, "longest sequence in tokens", names=("max-model-len", "c"), low=1, shown="the model's"
    )
    served_model_name: str | None = option(None, "model name that clients see", shown="the model's name")
    chat_template: str | None = option(None, "file with a Jinja chat template", shown="the model's")
    tool_call_parser: str | None = option(
        None,
        "tool calls: hermes, llama3, mistral, pythonic, deepseek_v3, glm, qwen3_coder, kimi_k2, gpt-oss or none",
        shown="by the chat template",
    )
    reasoning_parser: str | None = option(
        None, "reasoning: think, mistral, kimi, gpt-oss or none", shown="by the chat template"
    )
    sampling_defaults: str = option(
        "model",
        "default sampling parameters: the model's generation_config, or OpenAI's constants",
        choices=("model", "openai"),
    )
    random_seed: int | None = option(
        None,
        "seed of everything random that a request does not seed",
        names=("seed",),
        low=0,
        high=2**63 - 1,
        shown="random",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    device: str = option("auto", "hardware to run on", choices=("auto", "cpu", "cuda", "null"))
    tensor_parallel_size: int = option(
        1, "processes that each compute a part of every layer, one GPU each", names=("tp-size", "tp"), low=1, high=64
    )
    threads: int | None = option(
        None,
        "CPU threads of the engine, of all its ranks together",
        names=("t",),
        low=1,
        high=4096,
        shown="the cores this process may use",
    )
    attention_backend: str = option("auto", "attention backend of both phases")
    prefill_attention_backend: str | None = option(None, "attention backend of extends", shown="attention-backend")
    decode_attention_backend: str | None = option(None, "attention backend of decode steps", shown="attention-backend")

    grammar_backend: str = option(
        "auto", "library that compiles grammars; none refuses them", choices=("auto", "llguidance", "none")
    )
    disable_jump_forward: bool = option(False, "sample forced tokens one by one instead of appending them")
    deterministic: bool = option(
        False,
        "the same text alone and in any batch, cached or not; slower (on a CPU: computes in float32)",
        names=("enable-deterministic-inference",),
    )
    disable_cuda_graph: bool = option(False, "launch the kernels of decode steps one by one", names=("enforce-eager",))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    page_size: int | None = option(
        None, "tokens in a KV page", names=("block-size",), low=1, high=1024, shown="1, or what the backend needs"
    )
    mem_fraction_static: float | None = option(
        None,
        "share of the device's memory for weights and KV pool together",
        names=("gpu-memory-utilization",),
        low=0.01,
        high=0.99,
        shown="computed from the memory that is free",
    )
    max_total_tokens: int | None = option(None, "KV pool size in tokens", low=1, shown="from memory")
    kv_cache_dtype: str = option(
        "auto",
        "data type of the KV cache; 8 bits hold twice as many tokens as 16, on GPUs",
        choices=("auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"),
        aliases=(*DTYPES, ("fp8", "fp8_e4m3")),
    )
    disable_radix_cache: bool = option(False, "do not keep or reuse prefixes", names=("no-enable-prefix-caching",))
    radix_eviction_policy: str = option(
        "lru", "which unused prefix goes first", choices=("lru", "lfu", "fifo", "mru", "slru", "priority")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    schedule_policy: str = option(
        "fcfs",
        "order of waiting requests",
        choices=("fcfs", "lpm", "dfs-weight", "lof", "random"),
    )
    schedule_conservativeness: float = option(
        1.0, "above 1 admits fewer requests (fewer pauses), below 1 more", low=0, high=100
    )
    chunked_prefill_size: int | None = option(
        None, "most prompt tokens of one request computed in one step", low=1, shown="512 on a CPU, 8192 on CUDA"
    )
    max_prefill_tokens: int | None = option(
        None,
        "prompt tokens computed in one step; decode rows ride on top",
        names=("max-num-batched-tokens",),
        low=1,
        shown="chunked-prefill-size",
    )
    max_running_requests: int | None = option(
        None,
        "sequences running at once",
        names=("max-num-seqs",),
        low=1,
        shown="by memory, at most 256 on a CPU and 1024 on CUDA",
    )
    max_queued_requests: int = option(4096, "sequences that may wait; more are answered 429", low=1)
    lpm_max_wait: float = option(
        5.0, "seconds after which a waiting request goes ahead of longer prefix matches", low=0
    )
    enable_priority_scheduling: bool = option(False, "requests carry priorities, and higher ones preempt")
    priority_preemption_threshold: int = option(
        10, "priority difference at which a running request is paused for a new one", low=0
    )
    disable_overlap_schedule: bool = option(
        False, "plan the next step only after the last one is known", names=("no-async-scheduling",)
    )
    queue_timeout: float = option(0.0, "seconds a request may wait before it starts; 0 for no limit", low=0)
    request_timeout: float = option(0.0, "seconds a request may take in all; 0 for no limit", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(30000, "port to listen on", names=("p",), low=0, high=65535)
    api_key: str | None = option(
        None, "key that every route but the health checks asks for", secret=True, shown="no key"
    )
    api_key_file: str | None = option(
        None,
        "YAML file of keys with names, scopes and weights; waiting requests are then served in fair shares",
        shown="none",
    )
    admin_api_key: str | None = option(None, "key of the control routes (flush, abort)", secret=True, shown="api-key")
    root_path: str = option("", "path prefix that a proxy in front strips")
    allowed_origins: str = option(
        "", "comma-separated origins for cross-origin requests; * for any", names=("cors-allow-origins",)
    )
    shutdown_timeout: float = option(30.0, "seconds that running requests get after SIGTERM", low=0)
    skip_server_warmup: bool = option(False, "do not run a request before the server calls itself ready")
    stream_interval: int = option(1, "tokens between two messages of a stream", low=1)
    sse_keepalive: float = option(
        15.0, "seconds of silence after which a stream gets a comment line; 0 for never", low=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    max_body_bytes: int = option(16 << 20, "largest request body in bytes", low=1024)
    max_choices: int = option(128, "largest n of a request", low=1)
    max_batch_items: int = option(4096, "most prompts in one request", low=1)
    max_stop_strings: int = option(64, "most stop strings, stop patterns and stop ids of a request", low=0)
    max_logprobs: int = option(
        128, "most alternatives per token in logprobs", names=("max-top-logprobs",), low=0, high=1024
    )
    max_grammar_bytes: int = option(1 << 20, "longest grammar or JSON schema of a request in bytes", low=1)
    grammar_timeout: float = option(10.0, "seconds that compiling a grammar may take", low=0.01)
    template_timeout: float = option(5.0, "seconds that rendering a chat template may take", low=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    log_level: str = option("info", "least severe log lines to print", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "form of log lines", choices=("text", "json"))
    log_requests: bool = option(False, "one line per finished request (never its text)")
    log_stats_interval: float = option(10.0, "seconds between status lines while busy; 0 for none", low=0)
    disable_metrics: bool = option(False, "do not serve /metrics")
    watchdog_timeout: float = option(
        300.0, "seconds a step may take before the engine dumps its stacks and ends; 0 for no limit", low=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole tree. A component receives only its own branch."""

    model: ModelConfig = ModelConfig()
    device: DeviceConfig = DeviceConfig()
    cache: CacheConfig = CacheConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    observe: ObserveConfig = ObserveConfig()
