"""This module owns the choice of an attention backend, and the reasons for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence

import torch

from radixlm.attention.base import AttentionBackend, Capabilities, LayerSpec
from radixlm.base.registry import Choice, Entry, Registry

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})

#: In order of preference. The capabilities stand here as well, so that choosing imports nothing.
BACKENDS: Registry[Capabilities] = Registry(
    "attention backend",
    (
        Entry(
            "cpu",
            "radixlm.attention.cpu:CpuAttention",
            Capabilities(devices=frozenset({"cpu"}), dtypes=FLOATS, kv_dtypes=FLOATS),
        ),
        Entry(
            "cudnn",
            "radixlm.attention.cudnn:CudnnAttention",
            Capabilities(
                devices=frozenset({"cuda"}),
                dtypes=frozenset({torch.bfloat16, torch.float16}),
                head_dims=frozenset({64, 96, 128}),
                window=False,
                soft_cap=False,
                requires=("triton",),
                shared_prefix=True,
            ),
        ),
        Entry(
            "triton",
            "radixlm.attention.triton:TritonAttention",
            Capabilities(
                devices=frozenset({"cuda"}),
                dtypes=FLOATS,
                kv_dtypes=FLOATS | FP8,
                head_dims=frozenset({16, 32, 64, 80, 96, 128, 256}),
                requires=("triton",),
                shared_prefix=True,
            ),
        ),
        Entry(
            "fixed",
            "radixlm.attention.fixed:FixedAttention",
            Capabilities(
                devices=frozenset({"cuda"}),
                dtypes=FLOATS,
                kv_dtypes=FLOATS | FP8,
                head_dims=frozenset({16, 32, 64, 80, 96, 128, 256}),
                requires=("triton",),
                deterministic=True,
            ),
        ),
        Entry(
            "torch_ref",
            "radixlm.attention.torch_ref:TorchReference",
            Capabilities(devices=frozenset(), kv_dtypes=FLOATS | FP8),
        ),
    ),
)


def choose(
    wanted: str,
    device: str,
    dtype: torch.dtype,
    specs: Sequence[LayerSpec],
    page_size: int,
    kv_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> tuple[AttentionBackend, Choice]:
    """The backend called `wanted`, or the best that can serve these layers if it is `auto`.

    Args:
        device: kind of device (cpu, cuda).
        dtype: of activations.
        kv_dtype: of keys and values in the pool; None: that of activations.
        deterministic: a token's result must depend on its own sequence alone.

    Raises:
        StartupError: the wanted one cannot serve, or is not known; the message says why and what can.
    """

    def object_to(entry: Entry[Capabilities]) -> str | None:
        if deterministic and not entry.capabilities.deterministic:
            return "sums in an order that depends on the batch"
        return objection(entry.capabilities, device, dtype, specs, page_size, kv_dtype or dtype)

    choice = BACKENDS.select(wanted, object_to)
    backend: AttentionBackend = BACKENDS.get(choice.name).load()()
    return backend, choice


def objection(
    able: Capabilities,
    device: str,
    dtype: torch.dtype,
    specs: Sequence[LayerSpec],
    page_size: int,
    kv_dtype: torch.dtype,
) -> str | None:
    """Why a backend with these capabilities cannot serve, or None."""
    if able.devices and device not in able.devices:
        return f"runs on {_list(able.devices)}, not on {device}"
    if able.dtypes and dtype not in able.dtypes:
        return f"computes in {_list(map(_name, able.dtypes))}, not in {_name(dtype)}"
    if kv_dtype not in (dtype, *able.kv_dtypes):
        return f"keeps keys and values in {_list(map(_name, able.kv_dtypes | {dtype}))}, not in {_name(kv_dtype)}"
    odd = {spec.head_dim for spec in specs} - able.head_dims
    if able.head_dims and odd:
        return f"has head sizes {_list(map(str, able.head_dims))}, not {_list(map(str, odd))}"
    if able.page_sizes and page_size not in able.page_sizes:
        return f"has page sizes {_list(map(str, able.page_sizes))}, not {page_size}"
    if not able.window and any(spec.window for spec in specs):
        return "has no sliding window, which the model needs"
    if not able.soft_cap and any(spec.soft_cap for spec in specs):
        return "cannot cap scores, which the model needs"
    missing = [name for name in able.requires if importlib.util.find_spec(name) is None]
    return f"needs {_list(missing)}, which is not installed" if missing else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
