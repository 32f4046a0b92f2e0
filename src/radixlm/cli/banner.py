"""This module owns the banner of a server that is ready: what runs, where, why so, and a line to try."""

from __future__ import annotations

import ipaddress
import json
import shlex

from radixlm.base.facts import EngineFacts
from radixlm.cli.units import count, size
from radixlm.config.schema import Config


def banner(facts: EngineFacts, config: Config, url: str, seconds: float) -> str:
    """At most 12 lines.

    Args:
        url: where the server listens, without a trailing slash.
        seconds: from the command to ready.
    """
    model, device, pool = facts.model, facts.device, facts.pool
    dtype_why = facts.decisions.get("dtype", ("", ""))[1]
    name = config.model.served_model_name or model.name
    rows = [
        (
            "model",
            f"{name} ({model.architecture}, {count(model.parameters)} parameters, context {model.context_length:,})",
        ),
        ("device", f"{device.name} ({device.kind}, {device.threads} threads)" if device.kind == "cpu" else device.name),
        ("dtype", f"{model.dtype}, {size(model.weight_bytes)} of weights" + (f": {dtype_why}" if dtype_why else "")),
        ("attention", attention(facts)),
        (
            "KV pool",
            f"{pool.tokens:,} tokens = {pool.pages:,} pages of {pool.page_size}, {size(pool.bytes)}; "
            f"up to {pool.max_running} running requests",
        ),
        ("cache", _cache(config)),
        ("access", _access(config)),
        ("API", f"{url}/v1  (OpenAI), {url}/generate, {url}/metrics" if _metrics(config) else f"{url}/v1  (OpenAI)"),
    ]
    lines = [f"radixlm is ready after {seconds:.1f} s"]
    lines += [f"  {label.ljust(9)}  {text}" for label, text in rows]
    return "\n".join((*lines, "try it:", f"  {curl(config, name, url)}"))


def attention(facts: EngineFacts) -> str:
    """The attention backends in use, and why these."""
    none = ("none", f"a {facts.device.kind} device computes nothing")
    extend, why = facts.decisions.get("prefill_attention", none)
    decode, also = facts.decisions.get("decode_attention", none)
    return f"{extend}: {why}" if extend == decode else f"prefill {extend}: {why}; decode {decode}: {also}"


def curl(config: Config, model: str, url: str) -> str:
    """A command line that asks the server something."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    key = ' -H "Authorization: Bearer $RADIXLM_API_KEY"' if keyed(config) else ""
    # All interfaces are an address to listen on, not one to call.
    url = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    return f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def keyed(config: Config) -> bool:
    """Whether requests need a key."""
    return config.server.api_key is not None or config.server.api_key_file is not None


def _metrics(config: Config) -> bool:
    return not config.observe.disable_metrics


def _cache(config: Config) -> str:
    if config.cache.disable_radix_cache:
        return "off: prefixes are not kept (--disable-radix-cache)"
    return f"radix tree, evicting by {config.cache.radix_eviction_policy}; {config.schedule.schedule_policy} queue"


def _access(config: Config) -> str:
    key = "API key asked for" if keyed(config) else "no API key"
    if loopback(config.server.host):
        return f"{key}; this machine only"
    reach = f"listening on {config.server.host}, which other machines can reach"
    if keyed(config):
        return f"{key}; {reach}"
    return f"WARNING: {key}, and {reach}: set --api-key or --host 127.0.0.1"
