"""Says in about three minutes whether this machine gets Linformer's speed.

    python examples/benchmarks/quick_check.py

Compares two base-size layers (768 wide, 12 heads, 3072 in the feed-forward) with Transformers' RoBERTa, batch 1, and
the self-attention with that of the PyPI package `linformer` where it is installed. Outputs are compared before times.
Times are medians of interleaved runs, memory is the peak over what the process held before the forward pass.
"""

import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import HfArgumentParser, RobertaConfig, RobertaModel

from linformer_hf import LinformerConfig, LinformerModel
from linformer_hf.modeling_linformer import LinformerSelfAttention


SIZES = {"vocab_size": 1000, "num_hidden_layers": 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5}


@dataclass
class Arguments:
    """What is measured."""

    repeats: int = field(default=5, metadata={"help": "Interleaved runs of each configuration; the median counts."})
    projected_length: int = field(default=128, metadata={"help": "k."})
    threads: int = field(default=2, metadata={"help": "CPU threads."})
    dtype: str = field(default="bfloat16", metadata={"help": "Number format of the models."})


def linformer(length: int, args: Arguments, **options: Any) -> nn.Module:
    options = {"projected_length": args.projected_length} | options
    config = LinformerConfig(**SIZES, max_position_embeddings=length, **options)
    return LinformerModel(config).to(getattr(torch, args.dtype)).eval()


def roberta(length: int, attention: str, args: Arguments) -> nn.Module:
    config = RobertaConfig(**SIZES, max_position_embeddings=length + 2)
    config._attn_implementation = attention
    return RobertaModel(config, add_pooling_layer=False).to(getattr(torch, args.dtype)).eval()


def token_ids(length: int) -> torch.Tensor:
    return torch.randint(5, 1000, (1, length), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def interleaved_medians(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each run, after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def resident_memory(name: str) -> float:
    """MiB that the process holds (`VmRSS`), or has held at most (`VmHWM`)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 2**10


@torch.inference_mode()
def peak_memory(length: int, args: Arguments) -> float:
    """MiB that a forward pass adds to what the process held; to be called in a process of its own."""
    torch.set_num_threads(args.threads)
    model, inputs = linformer(length, args), token_ids(length)
    model(inputs[:, :64])  # loads the kernels
    before = resident_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    model(inputs)
    return resident_memory("VmHWM") - before


@torch.inference_mode()
def check_against_roberta(length: int = 61) -> float:
    """Largest difference to RoBERTa in float32 where k = n and E = F = identity, with RoBERTa's weights."""
    theirs = RobertaModel(RobertaConfig(**SIZES, max_position_embeddings=length + 2), add_pooling_layer=False).eval()
    config = LinformerConfig(**SIZES, max_position_embeddings=length, projected_length=length)
    ours = LinformerModel(config).eval()
    weights = theirs.state_dict()
    positions = "embeddings.position_embeddings.weight"
    weights[positions] = weights[positions][2:]
    ours.load_state_dict({**weights, "encoder.shared_projection.weight": torch.eye(length)})
    inputs = token_ids(length)
    return (ours(inputs).last_hidden_state - theirs(inputs).last_hidden_state).abs().max().item()


class PyPILinformer:
    """The self-attention of the package `linformer` and ours with the same weights."""

    def __init__(self, length: int, args: Arguments, dtype: torch.dtype):
        from linformer import LinformerSelfAttention as TheirSelfAttention

        options = {"max_position_embeddings": length, "projected_length": args.projected_length}
        config = LinformerConfig(**SIZES, **options, projection_sharing="headwise")
        config._attn_implementation = "sdpa"
        self.theirs = TheirSelfAttention(768, length, k=args.projected_length, heads=12).eval()
        self.ours = LinformerSelfAttention(config, 0).eval()
        self.output = nn.Linear(768, 768)
        t, o = self.theirs, self.ours
        pairs = [(o.query.weight, t.to_q.weight), (o.key.weight, t.to_k.weight), (o.value.weight, t.to_v.weight)]
        pairs += [(o.key_projection.weight, t.proj_k.T), (o.value_projection.weight, t.proj_v.T)]
        with torch.no_grad():
            for own, other in [*pairs, (self.output.weight, t.to_out.weight), (self.output.bias, t.to_out.bias)]:
                own.copy_(other)
            for layer in (o.query, o.key, o.value):
                layer.bias.zero_()
        for module in (self.theirs, self.ours, self.output):
            module.to(dtype)
        self.inputs = torch.randn(1, length, 768, generator=torch.Generator().manual_seed(0)).to(dtype)

    def run_ours(self) -> torch.Tensor:
        """(b, n, c)."""
        return self.output(self.ours(self.inputs)[0])

    def run_theirs(self) -> torch.Tensor:
        """(b, n, c)."""
        return self.theirs(self.inputs)


def report(figure: str, value: float, goal: float, at_least: bool = True) -> None:
    met = value >= goal if at_least else value <= goal
    bound = "at least" if at_least else "at most"
    print(f"{figure:<62} {value:8.2f}   goal: {bound} {goal:<5g} {'met' if met else 'NOT MET'}", flush=True)


def print_header(args: Arguments) -> None:
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    commit = git.stdout.strip() or "unknown"
    print(
        f"commit {commit}, {platform.machine()} CPU, {args.threads} threads, {args.dtype}, torch {torch.__version__},"
    )
    print(f"transformers {transformers.__version__}, 2 layers of base size, k={args.projected_length}, batch 1")


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    torch.set_num_threads(args.threads)
    print_header(args)
    print(f"largest difference to RoBERTa with E = F = identity: {check_against_roberta():.1e} (float32)")

    for length, attention, goal in ((4096, "sdpa", 1.6), (16384, "sdpa", 3.5), (8192, "eager", 10.0)):
        models = {"ours": linformer(length, args), "theirs": roberta(length, attention, args)}
        runs = {name: partial(model, token_ids(length)) for name, model in models.items()}
        seconds = interleaved_medians(runs, args.repeats)
        print(f"n={length}: Linformer {seconds['ours']:.3f} s, RoBERTa {attention} {seconds['theirs']:.3f} s")
        report(f"speed against RoBERTa {attention}, n={length}", seconds["theirs"] / seconds["ours"], goal)

    runs = {str(length): partial(linformer(length, args), token_ids(length)) for length in (4096, 16384)}
    seconds = interleaved_medians(runs, args.repeats)
    report("time(16384) / time(4096)", seconds["16384"] / seconds["4096"], 4.4, at_least=False)
    local = {"projection_type": "mean_pooling", "projected_length": 64, "local_attention_window": 64}
    models = {"window": linformer(16384, args, **local, num_global_tokens=1), "plain": linformer(16384, args)}
    seconds = interleaved_medians({name: partial(m, token_ids(16384)) for name, m in models.items()}, args.repeats)
    report("time with w=64, k=64 / without window, n=16384", seconds["window"] / seconds["plain"], 1.5, at_least=False)
    if sys.platform == "linux":
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # else memory that was freed but kept would hide a part
        memory = {}
        for length in (4096, 16384):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                memory[length] = pool.submit(peak_memory, length, args).result()
        print(f"peak memory of a forward pass: {memory[4096]:.0f} MiB at 4096, {memory[16384]:.0f} MiB at 16384")
        report("memory(16384) / memory(4096)", memory[16384] / memory[4096], 4.2, at_least=False)

    try:
        check = PyPILinformer(512, args, torch.float32)
    except ImportError:
        print("PyPI linformer is not installed (pip install linformer==0.2.3): not compared")
        return
    difference = (check.run_ours() - check.run_theirs()).abs().max().item()
    print(f"largest difference to PyPI linformer with its weights: {difference:.1e} (float32)")
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        pair = PyPILinformer(length, args, getattr(torch, args.dtype))
        seconds = interleaved_medians({"ours": pair.run_ours, "theirs": pair.run_theirs}, 4 * args.repeats)
        report(f"speed against PyPI linformer's attention, n={length}", seconds["theirs"] / seconds["ours"], 1.0)


if __name__ == "__main__":
    main()
