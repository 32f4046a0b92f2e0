#!/usr/bin/env python3
"""Offline serving workloads with dummy weights: one runner, one adapter per engine.

    python gpu_workloads.py --engine vllm --shape llama8b --workloads W1,W2,W3,W4,W5
    python gpu_workloads.py --engine ceilings            # copy / read bandwidth, matmul rate
    python gpu_workloads.py --engine floors --bw 4.3 --tflops 780   # no GPU needed

Prints one JSON line per workload (prefix ``RESULT ``) and appends it to --out.
No model files are needed: the shapes below write a config.json (and, for engines
that insist on one, a made-up tokenizer) into a scratch folder, and every engine
is told to make random weights itself.

Adding an engine: subclass Engine, implement start() and generate(), register it
in ENGINES. generate() gets token ids, must produce exactly `max_tokens` tokens a
request (greedy, EOS ignored) and return when all of them are on the host.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time

# --------------------------------------------------------------------------- shapes

SHAPES = {
    # Llama-3.1-8B
    "llama8b": dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=128000,
        eos_token_id=128001,
        hidden_act="silu",
        hidden_size=4096,
        initializer_range=0.02,
        intermediate_size=14336,
        max_position_embeddings=131072,
        mlp_bias=False,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        head_dim=128,
        pretraining_tp=1,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        use_cache=True,
        vocab_size=128256,
    ),
    # Qwen3-0.6B
    "qwen06b": dict(
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=151643,
        eos_token_id=151645,
        head_dim=128,
        hidden_act="silu",
        hidden_size=1024,
        initializer_range=0.02,
        intermediate_size=3072,
        max_position_embeddings=40960,
        max_window_layers=28,
        num_attention_heads=16,
        num_hidden_layers=28,
        num_key_value_heads=8,
        rms_norm_eps=1e-6,
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        use_cache=True,
        use_sliding_window=False,
        vocab_size=151936,
    ),
}


def write_model_dir(shape: str, root: str | None = None) -> str:
    d = os.path.join(root or tempfile.gettempdir(), "dummy-models", shape)
    os.makedirs(d, exist_ok=True)
    with open(os.path.join(d, "config.json"), "w") as f:
        json.dump(SHAPES[shape], f)
    return d


# ------------------------------------------------------------------------ workloads

SHORT, LONG = 32, 256  # two output lengths: their difference is steady-state decode


class Pass:
    """One timed call of generate(): prompts and one output length for all of them."""

    def __init__(self, prompts, max_tokens):
        self.prompts, self.max_tokens = prompts, max_tokens

    @property
    def tokens_in(self):
        return sum(len(p) for p in self.prompts)

    @property
    def tokens_out(self):
        return len(self.prompts) * self.max_tokens


def rand_ids(rng: random.Random, n: int, vocab: int) -> list[int]:
    # stay clear of the special ids at the top of the vocabulary
    return rng.choices(range(10, min(vocab, 120000)), k=n)


def uniform(seed, vocab, n, tin, tout):
    rng = random.Random(seed)
    return Pass([rand_ids(rng, tin, vocab) for _ in range(n)], tout)


def shared_prefix(seed, vocab, groups=64, per=16, pre=2048, suf=128, tout=64, shuffle=True):
    rng = random.Random(seed)
    prompts = []
    for _ in range(groups):
        p = rand_ids(rng, pre, vocab)
        prompts += [p + rand_ids(rng, suf, vocab) for _ in range(per)]
    if shuffle:
        rng.shuffle(prompts)
    return Pass(prompts, tout)


def run_w1(r):
    """1000 requests, 1024 in / 128 out, all submitted at once."""
    return r.throughput("W1", lambda s: uniform(s, r.vocab, 1000, 1024, 128), r.repeats.get("W1", 1))


def run_w2(r):
    """One request: 128 in / 256 out."""
    return r.decode("W2", 1)


def run_w3(r):
    """Decode at batch 64 and 256: 128 in / 256 out."""
    r.decode("W3-64", 64)
    return r.decode("W3-256", 256)


def run_w4(r):
    """64 groups x 16 requests, 2048 shared + 128 own in / 64 out; order shuffled, then grouped."""
    n = r.repeats.get("W4", 2)
    r.throughput("W4", lambda s: shared_prefix(s, r.vocab), n)
    return r.throughput("W4-grouped", lambda s: shared_prefix(s, r.vocab, shuffle=False), 1)


def run_w5(r):
    """Prefill only: 64 requests of 4096 in / 1 out."""
    return r.throughput("W5", lambda s: uniform(s, r.vocab, 64, 4096, 1), r.repeats.get("W5", 2))


WORKLOADS = {
    "W1": run_w1,
    "W2": run_w2,
    "W3": run_w3,
    "W4": run_w4,
    "W5": run_w5,
    "W3-64": lambda r: r.decode("W3-64", 64),
    "W3-256": lambda r: r.decode("W3-256", 256),
}


class Runner:
    def __init__(self, engine, shape, repeats, out, warm=True):
        self.e, self.shape, self.repeats, self.out = engine, shape, repeats, out
        self.vocab = SHAPES[shape]["vocab_size"]
        self.seed = 1000

    def emit(self, **kw):
        rec = dict(engine=self.e.name, shape=self.shape, **kw)
        line = json.dumps(rec)
        print("RESULT " + line, flush=True)
        if self.out:
            with open(self.out, "a") as f:
                f.write(line + "\n")
        return rec

    def timed(self, p: Pass) -> float:
        gc.collect()
        t = time.perf_counter()
        counts = self.e.generate(p.prompts, p.max_tokens)
        dt = time.perf_counter() - t
        assert len(counts) == len(p.prompts), (len(counts), len(p.prompts))
        bad = [c for c in counts if c != p.max_tokens]
        if bad:
            raise RuntimeError(f"{len(bad)} requests gave {bad[:4]} tokens, not {p.max_tokens}")
        return dt

    def next_seed(self):  # fresh prompts every pass, so no prefix cache hit across passes
        self.seed += 1
        return self.seed

    def warmup(self):
        """Touch every code path once: short, long and mixed batches, a reused prefix."""
        t = time.perf_counter()
        v = self.vocab
        for n, tin, tout in self.e.warm_passes():
            self.timed(uniform(self.next_seed(), v, n, tin, tout))
        self.timed(shared_prefix(self.next_seed(), v, 2, 4, 512, 64, 4))
        self.emit(workload="warmup", seconds=round(time.perf_counter() - t, 2))

    def throughput(self, name, make, n):
        ts, p = [], None
        for _ in range(n):
            p = make(self.next_seed())
            ts.append(self.timed(p))
        t = statistics.median(ts)
        return self.emit(
            workload=name,
            requests=len(p.prompts),
            tokens_in=p.tokens_in,
            tokens_out=p.tokens_out,
            seconds=[round(x, 3) for x in ts],
            median_s=round(t, 3),
            total_tok_s=round((p.tokens_in + p.tokens_out) / t),
            in_tok_s=round(p.tokens_in / t),
            out_tok_s=round(p.tokens_out / t),
            req_s=round(len(p.prompts) / t, 2),
        )

    def decode(self, name, bs):
        n = self.repeats.get(name, 3)
        tl, ts = [], []
        for _ in range(n):
            tl.append(self.timed(uniform(self.next_seed(), self.vocab, bs, 128, LONG)))
            ts.append(self.timed(uniform(self.next_seed(), self.vocab, bs, 128, SHORT)))
        ml, ms = statistics.median(tl), statistics.median(ts)
        step = (ml - ms) / (LONG - SHORT)
        return self.emit(
            workload=name,
            requests=bs,
            tokens_in=bs * 128,
            tokens_out=bs * LONG,
            seconds=[round(x, 4) for x in tl],
            seconds_short=[round(x, 4) for x in ts],
            e2e_ms_per_token=round(ml / LONG * 1e3, 4),
            e2e_out_tok_s=round(bs * LONG / ml, 1),
            steady_ms_per_step=round(step * 1e3, 4),
            steady_out_tok_s=round(bs / step, 1),
        )


# ------------------------------------------------------------------------- adapters


class Engine:
    name = "?"

    def __init__(self, model_dir, shape, opts):
        self.model_dir, self.shape, self.opts = model_dir, shape, opts

    def start(self) -> dict:
        """Bring the engine up, ready for requests; return facts worth recording."""
        raise NotImplementedError

    def generate(self, prompts, max_tokens) -> list[int]:
        """Serve all prompts to the end; return the number of tokens each produced."""
        raise NotImplementedError

    def warm_passes(self):
        return [(1, 128, 8), (64, 128, 8), (256, 128, 8), (32, 1024, 4), (8, 4096, 1)]

    def stop(self):
        pass


class VLLM(Engine):
    name = "vllm"

    def start(self):
        import vllm
        from vllm import LLM, SamplingParams

        self.SP = SamplingParams
        kw = dict(
            model=self.model_dir,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            gpu_memory_utilization=0.85,
            max_model_len=8192,
            seed=0,
        )
        kw.update(self.opts)
        self.llm = LLM(**kw)
        return dict(version=vllm.__version__, args={k: v for k, v in kw.items() if k != "model"})

    def generate(self, prompts, max_tokens):
        sp = self.SP(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], sp, use_tqdm=False)
        return [len(o.outputs[0].token_ids) for o in outs]


class SGLang(Engine):
    name = "sglang"

    def start(self):
        import sglang as sgl

        kw = dict(
            model_path=self.model_dir,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            mem_fraction_static=0.85,
            context_length=8192,
            random_seed=0,
            log_level="info",
        )
        kw.update(self.opts)
        self.llm = sgl.Engine(**kw)
        return dict(version=sgl.__version__, args={k: v for k, v in kw.items() if k != "model_path"})

    def generate(self, prompts, max_tokens):
        outs = self.llm.generate(
            input_ids=prompts, sampling_params=dict(temperature=0.0, max_new_tokens=max_tokens, ignore_eos=True)
        )
        return [o["meta_info"]["completion_tokens"] for o in outs]

    def stop(self):
        self.llm.shutdown()


class MiniSGL(Engine):
    name = "minisgl"

    def start(self):
        import minisgl.scheduler.scheduler as sched
        from minisgl.core import SamplingParams
        from minisgl.llm import LLM

        class NoTokenizer:  # the scheduler wants an EOS id and a decode(); neither is used here
            eos_token_id = -1
            chat_template = "-"

            def decode(self, ids):
                return ""

        sched.load_tokenizer = lambda path: NoTokenizer()
        self.SP = SamplingParams
        kw = dict(use_dummy_weight=True, memory_ratio=0.85, max_seq_len_override=8192)
        kw.update(self.opts)
        self.llm = LLM(self.model_dir, **kw)
        return dict(version="0.1.0", args=kw)

    def generate(self, prompts, max_tokens):
        sp = self.SP(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        return [len(o["token_ids"]) for o in self.llm.generate(prompts, sp)]


class RadixLM(Engine):
    """Our engine, in this process."""

    name = "radixlm"

    def start(self):
        import radixlm

        write_tokenizer(self.model_dir, SHAPES[self.shape]["vocab_size"])
        kw = dict(
            model=self.model_dir, load_format="dummy", device="cuda", dtype="bfloat16", mem_fraction_static=0.85,
            context_length=8192, random_seed=0, watchdog_timeout=0.0,
        )  # fmt: skip
        kw.update(self.opts)
        self.llm = radixlm.Engine(**kw)
        facts = self.llm.facts
        return dict(
            version=radixlm.__version__,
            args={k: v for k, v in kw.items() if k != "model"},
            pool_tokens=facts.pool.tokens,
            timings={k: round(v, 2) for k, v in facts.timings.items()},
        )

    def generate(self, prompts, max_tokens):
        params = dict(temperature=0.0, max_new_tokens=max_tokens, ignore_eos=True, skip_special_tokens=False)
        outs = self.llm.generate(input_ids=prompts, sampling_params=params)
        self.retractions = sum(out["meta_info"]["num_retractions"] for out in outs)
        return [out["meta_info"]["completion_tokens"] for out in outs]

    def stop(self):
        self.llm.shutdown()


def write_tokenizer(model_dir, vocab_size):
    """A word for each id: our engine serves text, so it wants a tokenizer; the workloads speak in ids."""
    path = os.path.join(model_dir, "tokenizer.json")
    if not os.path.exists(path):
        vocab = {f"t{i}": i for i in range(vocab_size)}
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}
        with open(path, "w") as f:
            json.dump(
                {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}, f
            )


class HF(Engine):
    """transformers generate(): one static batch, the low anchor. Equal-length prompts only."""

    name = "hf"

    def start(self):
        import torch
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM

        self.torch = torch
        cfg = AutoConfig.from_pretrained(self.model_dir)
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.model = AutoModelForCausalLM.from_config(cfg, dtype=torch.bfloat16).eval()
        self.kw = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
        self.kw.update(self.opts)
        torch.cuda.synchronize()
        return dict(version=transformers.__version__, args=self.kw)

    def warm_passes(self):
        return [(1, 128, 8), (64, 128, 8)]

    def generate(self, prompts, max_tokens):
        torch = self.torch
        ids = torch.tensor(prompts, device="cuda")
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=max_tokens,
                max_new_tokens=max_tokens,
                **self.kw,
            )
        out = out[:, ids.shape[1] :].cpu()
        return [out.shape[1]] * len(prompts)


ENGINES = {c.name: c for c in (RadixLM, VLLM, SGLang, MiniSGL, HF)}

# ------------------------------------------------------------------ ceilings, floors


def ceilings(out):
    import torch

    def bench(fn, n=10, warm=3):
        for _ in range(warm):
            fn()
        torch.cuda.synchronize()
        ts = []
        for _ in range(n):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            fn()
            b.record()
            b.synchronize()
            ts.append(a.elapsed_time(b) / 1e3)
        return statistics.median(ts)

    r = dict(
        engine="ceilings",
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        sms=torch.cuda.get_device_properties(0).multi_processor_count,
    )
    x = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    r["copy_TBps_read_plus_write"] = round(2 * x.numel() / bench(lambda: y.copy_(x)) / 1e12, 3)
    del y
    f = x.view(torch.float32)
    torch.nan_to_num_(f, 0.0, 0.0, 0.0)
    r["reduce_TBps_read"] = round(x.numel() / bench(lambda: f.amax()) / 1e12, 3)
    del x, f
    # decode-shaped reads: one pass over a weight far larger than L2
    w = torch.randn(131072, 4096, device="cuda", dtype=torch.bfloat16)
    for m in (1, 64, 256):
        a = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
        t = bench(lambda: a @ w.t())
        r[f"linear_m{m}_TBps_weights"] = round(w.numel() * 2 / t / 1e12, 3)
    del w
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    r["matmul8192_TFLOPs"] = round(2 * 8192**3 / bench(lambda: a @ b, 20) / 1e12, 1)
    for m, n, k in ((16384, 28672, 4096), (16384, 4096, 14336), (16384, 6144, 4096)):
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
        r[f"matmul_{m}x{n}x{k}_TFLOPs"] = round(2 * m * n * k / bench(lambda: a @ b.t(), 20) / 1e12, 1)
    # sustained: 3 s of the gate/up product back to back, as a long prefill does
    a = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(28672, 4096, device="cuda", dtype=torch.bfloat16) * 0.02
    o = torch.empty(16384, 28672, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    t, n = time.perf_counter(), 0
    while time.perf_counter() - t < 3:
        for _ in range(20):
            torch.mm(a, b.t(), out=o)
        torch.cuda.synchronize()
        n += 20
    r["matmul_sustained_3s_TFLOPs"] = round(2 * 16384 * 28672 * 4096 * n / (time.perf_counter() - t) / 1e12, 1)
    line = json.dumps(r)
    print("RESULT " + line, flush=True)
    if out:
        with open(out, "a") as fo:
            fo.write(line + "\n")


def anchors(out):
    """Kernel-level anchors for a decode step: cuBLAS linears, FlashAttention-3 and FlashInfer attention.

    Every timing is a CUDA graph over several copies of its operands (as many layers have), so that
    nothing is served from L2 that a real step would not find there.
    """
    import torch

    dev = "cuda"

    def graph_time(fns, reps=10):
        """Seconds of one of `fns`, all captured back to back in one graph."""
        s = torch.cuda.Stream()
        s.wait_stream(torch.cuda.current_stream())  # the operands are still being filled there
        with torch.cuda.stream(s):
            for f in fns[:2]:
                f()
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for f in fns:
                f()
        ts = []
        for i in range(reps + 2):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            g.replay()
            b.record()
            b.synchronize()
            if i > 1:
                ts.append(a.elapsed_time(b) / 1e3)
        return statistics.median(ts) / len(fns)

    def emit(**kw):
        line = json.dumps(dict(engine="anchors", **kw))
        print("RESULT " + line, flush=True)
        if out:
            with open(out, "a") as f:
                f.write(line + "\n")

    def guarded(name, fn):
        try:
            fn()
        except Exception as ex:
            emit(anchor=name, error=f"{type(ex).__name__}: {ex}"[:300])

    for shape, c in SHAPES.items():
        h, q, kv, d, i = (
            c["hidden_size"],
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
            c["intermediate_size"],
        )
        lin = dict(
            qkv=((q + 2 * kv) * d, h), o=(h, q * d), gate_up=(2 * i, h), down=(h, i), lm_head=(c["vocab_size"], h)
        )
        tot = {}
        for name, (n, k) in lin.items():
            cnt = max(2, min(32, -(-(768 << 20) // (n * k * 2))))
            ws = [torch.randn(n, k, device=dev, dtype=torch.bfloat16) * 0.02 for _ in range(cnt)]
            row = {}
            for m in (1, 8, 64, 128, 256, 512, 1024):
                x = torch.randn(m, k, device=dev, dtype=torch.bfloat16)
                t = graph_time([lambda w=w: torch.nn.functional.linear(x, w) for w in ws])
                row[m] = round(t * 1e6, 2)
                tot[m] = tot.get(m, 0) + t * (1 if name == "lm_head" else c["num_hidden_layers"])
            emit(
                anchor="linear",
                shape=shape,
                name=name,
                n=n,
                k=k,
                us=row,
                TBps={m: round(n * k * 2 / u / 1e6, 2) for m, u in row.items()},
            )
            del ws
        emit(anchor="linears_per_step", shape=shape, ms={m: round(t * 1e3, 3) for m, t in tot.items()})

    H, KV, D = 32, 8, 128

    def fa3():
        from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        for bs, ctx in ((1, 272), (64, 272), (256, 272), (64, 1152), (256, 1152), (64, 4096), (256, 4096)):
            for page in (1, 16, 128):
                pages = bs * -(-ctx // page)
                L = max(2, min(16, (1 << 30) // (pages * page * KV * D * 4) + 1))
                ks = [torch.randn(pages, page, KV, D, device=dev, dtype=torch.bfloat16) for _ in range(L)]
                vs = [torch.randn_like(k) for k in ks]
                tab = torch.randperm(pages, device=dev).int().view(bs, -1)
                lens = torch.full((bs,), ctx, device=dev, dtype=torch.int32)
                cu = torch.arange(bs + 1, device=dev, dtype=torch.int32)
                x = torch.randn(bs, H, D, device=dev, dtype=torch.bfloat16)
                row = {}
                for splits in (0, 1):  # 0: the library's own choice
                    t = graph_time(
                        [
                            lambda k=k, v=v: flash_attn_with_kvcache(
                                x,
                                k,
                                v,
                                cache_seqlens=lens,
                                page_table=tab,
                                cu_seqlens_q=cu,
                                max_seqlen_q=1,
                                num_splits=splits,
                                causal=True,
                            )
                            for k, v in zip(ks, vs)
                        ]
                    )
                    row[splits] = t
                emit(
                    anchor="fa3_decode",
                    bs=bs,
                    ctx=ctx,
                    page=page,
                    us={s: round(t * 1e6, 2) for s, t in row.items()},
                    TBps_kv={s: round(bs * ctx * KV * D * 4 / t / 1e12, 3) for s, t in row.items()},
                )
                del ks, vs
        for n, ln in ((16, 1024), (4, 4096), (1, 16384)):
            x = torch.randn(n * ln, H, D, device=dev, dtype=torch.bfloat16)
            k = torch.randn(n * ln, KV, D, device=dev, dtype=torch.bfloat16)
            v = torch.randn_like(k)
            cu = torch.arange(n + 1, device=dev, dtype=torch.int32) * ln
            t = graph_time([lambda: flash_attn_varlen_func(x, k, v, cu, cu, ln, ln, causal=True)] * 4)
            emit(
                anchor="fa3_prefill",
                seqs=n,
                len=ln,
                ms=round(t * 1e3, 3),
                TFLOPs=round(4 * H * D * n * ln * (ln + 1) / 2 / t / 1e12, 1),
            )

    def fi():
        import flashinfer

        ws = torch.empty(256 << 20, dtype=torch.uint8, device=dev)
        for bs, ctx in ((1, 272), (64, 272), (256, 272), (64, 1152), (256, 1152), (64, 4096), (256, 4096)):
            for page in (1, 16):
                per = -(-ctx // page)
                pages = bs * per
                L = max(2, min(16, (1 << 30) // (pages * page * KV * D * 4) + 1))
                ks = [torch.randn(pages, page, KV, D, device=dev, dtype=torch.bfloat16) for _ in range(L)]
                vs = [torch.randn_like(k) for k in ks]
                indptr = torch.arange(bs + 1, dtype=torch.int32, device=dev) * per
                idx = torch.randperm(pages, device=dev).int()
                last = torch.full((bs,), (ctx - 1) % page + 1, dtype=torch.int32, device=dev)
                w = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    ws,
                    "NHD",
                    use_cuda_graph=True,
                    use_tensor_cores=True,
                    paged_kv_indptr_buffer=indptr,
                    paged_kv_indices_buffer=idx,
                    paged_kv_last_page_len_buffer=last,
                    backend="fa2",
                )
                w.plan(indptr, idx, last, H, KV, D, page, data_type=torch.bfloat16, q_data_type=torch.bfloat16)
                x = torch.randn(bs, H, D, device=dev, dtype=torch.bfloat16)
                t = graph_time([lambda k=k, v=v: w.run(x, (k, v)) for k, v in zip(ks, vs)])
                emit(
                    anchor="flashinfer_fa2_decode",
                    bs=bs,
                    ctx=ctx,
                    page=page,
                    us=round(t * 1e6, 2),
                    TBps_kv=round(bs * ctx * KV * D * 4 / t / 1e12, 3),
                )
                del ks, vs

    def elementwise():
        import flashinfer

        wgt = torch.ones(4096, device=dev, dtype=torch.bfloat16)
        for m in (1, 64, 256, 8192):
            xs = [torch.randn(m, 4096, device=dev, dtype=torch.bfloat16) for _ in range(8)]
            rs = [torch.randn_like(x) for x in xs]
            gu = [torch.randn(m, 28672, device=dev, dtype=torch.bfloat16) for _ in range(4)]
            a = graph_time([lambda x=x, r=r: flashinfer.fused_add_rmsnorm(x, r, wgt, 1e-5) for x, r in zip(xs, rs)])
            b = graph_time([lambda g=g: flashinfer.silu_and_mul(g) for g in gu])
            emit(anchor="elementwise_us", m=m, fused_add_rmsnorm=round(a * 1e6, 2), silu_and_mul=round(b * 1e6, 2))

    guarded("fa3", fa3)
    guarded("flashinfer", fi)
    guarded("elementwise", elementwise)


def model_counts(c):
    """Multiply-accumulates a token in the layers, lm_head's, and the bytes of each (bf16)."""
    h, L, q, kv, d, i, v = (
        c["hidden_size"],
        c["num_hidden_layers"],
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["head_dim"],
        c["intermediate_size"],
        c["vocab_size"],
    )
    layer = h * (q + 2 * kv) * d + q * d * h + 3 * h * i
    return dict(layers=L * layer, head=h * v, kv_bytes=2 * L * kv * d * 2, attn=L * q * d)


def floor_prefill(c, lens, cached=0):
    """FLOPs to prefill one request of `lens` new tokens after `cached` reused ones (1 head row)."""
    m = model_counts(c)
    pairs = lens * cached + lens * (lens + 1) / 2  # causal
    return 2 * m["layers"] * lens + 2 * m["head"] + 4 * m["attn"] * pairs


def floor_decode_step(c, bs, ctx, bw, fl):
    """Seconds of one decode step: the larger of bytes (weights + KV) and FLOPs."""
    m = model_counts(c)
    byt = 2 * (m["layers"] + m["head"]) + bs * ctx * m["kv_bytes"]
    flo = bs * (2 * (m["layers"] + m["head"]) + 4 * m["attn"] * ctx)
    return max(byt / bw, flo / fl), byt, flo


def floors(c, bw, fl):
    """Lower bounds in seconds (or ms a step) at bw bytes/s and fl FLOP/s.

    W1, W4: prefill FLOPs, then decode steps with every request in one batch (fewer seats need more
    steps). *-overlap: all bytes hidden behind all FLOPs, as mixed prefill and decode batches could.
    W4-shared-read: decode attention reads each group's shared prefix once a step, not once a request.
    """
    m = model_counts(c)

    def decode(n, tin, tout):
        """Sum over the decode steps: (seconds, bytes, FLOPs)."""
        st = [floor_decode_step(c, n, tin + k, bw, fl) for k in range(1, tout)]
        return [sum(x) for x in zip(*st)]

    r = {}
    pf, (t, byt, flo) = 1000 * floor_prefill(c, 1024), decode(1000, 1024, 128)
    r["W1"] = pf / fl + t
    r["W1-overlap"] = max((pf + flo) / fl, byt / bw)
    for n in (1, 64, 256):
        st = [floor_decode_step(c, n, 128 + k, bw, fl) for k in range(SHORT, LONG)]
        r[f"W{2 if n == 1 else 3}-{n}-ms_per_step"] = sum(s[0] for s in st) / len(st) * 1e3
        lin = max(2 * (m["layers"] + m["head"]) / bw, n * 2 * (m["layers"] + m["head"]) / fl)
        kv = sum(n * (128 + k) * m["kv_bytes"] / bw for k in range(SHORT, LONG)) / (LONG - SHORT)
        r[f"W{2 if n == 1 else 3}-{n}-ms_linears_then_attention"] = (lin + kv) * 1e3
    pf = 64 * floor_prefill(c, 2048 + 128) + 64 * 15 * floor_prefill(c, 128, 2048)
    t, byt, flo = decode(1024, 2176, 64)
    r["W4"] = pf / fl + t
    saved = 63 * (1024 - 64) * 2048 * m["kv_bytes"]
    r["W4-shared-read"] = pf / fl + max((byt - saved) / bw, flo / fl)
    r["W4-no-reuse"] = 1024 * floor_prefill(c, 2176) / fl + t
    r["W5"] = 64 * floor_prefill(c, 4096) / fl
    return r


# ----------------------------------------------------------------------------- main


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--engine", required=True, choices=[*ENGINES, "ceilings", "anchors", "floors"])
    ap.add_argument("--shape", default="llama8b", choices=list(SHAPES))
    ap.add_argument("--workloads", default="W2,W3,W5,W4,W1")
    ap.add_argument("--repeats", default="", help="e.g. W1=2,W4=1")
    ap.add_argument("--opts", default="{}", help="JSON of engine arguments to add or override")
    ap.add_argument("--label", default="")
    ap.add_argument("--out", default="")
    ap.add_argument("--layers", type=int, default=0, help="cut the shape to so many layers (smoke tests)")
    ap.add_argument("--bw", type=float, default=4.3, help="TB/s, for floors")
    ap.add_argument("--tflops", type=float, default=780.0, help="TFLOP/s, for floors")
    a = ap.parse_args()
    if a.engine == "ceilings":
        return ceilings(a.out)
    if a.engine == "anchors":
        return anchors(a.out)
    if a.layers:
        SHAPES[a.shape]["num_hidden_layers"] = a.layers
    if a.engine == "floors":
        for s, c in SHAPES.items():
            f = floors(c, a.bw * 1e12, a.tflops * 1e12)
            print(s, json.dumps({k: round(v, 4) for k, v in f.items()}), model_counts(c))
        return None
    eng = ENGINES[a.engine](write_model_dir(a.shape), a.shape, json.loads(a.opts))
    if a.label:
        eng.name = a.label
    t = time.perf_counter()
    info = eng.start()
    run = Runner(eng, a.shape, {k: int(v) for k, v in (x.split("=") for x in a.repeats.split(",") if x)}, a.out)
    run.emit(workload="startup", seconds=round(time.perf_counter() - t, 2), **info)
    run.warmup()
    for w in a.workloads.split(","):
        try:
            WORKLOADS[w](run)
        except Exception as ex:  # one workload's failure must not lose the others
            run.emit(workload=w, error=f"{type(ex).__name__}: {ex}"[:400])
            import traceback

            traceback.print_exc()
    eng.stop()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engines leave worker threads behind; the numbers are out
