"""Says in about three minutes whether this machine gets Linformer's speed.

    python examples/benchmarks/quick_check.py

Compares two base-size layers (768 wide, 12 heads, 3072 in the feed-forward) with Transformers' RoBERTa, batch 1, and
the self-attention with that of the PyPI package `linformer` where it is installed. Outputs are compared before times.
Times are medians of interleaved runs, memory is the peak over what the process held before the forward pass.
`benchmark.py` measures more, and takes longer.
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch
from measuring import added_memory, environment, freed_memory_is_returned, interleaved_medians
from peers import PyPIAttention, Shape, difference_to_roberta, forward_pass
from transformers import HfArgumentParser


@dataclass
class Arguments:
    """What is measured."""

    repeats: int = field(default=5, metadata={"help": "Interleaved runs of each configuration; the median counts."})
    projected_length: int = field(default=128, metadata={"help": "k."})
    threads: int = field(default=2, metadata={"help": "CPU threads."})
    dtype: str = field(default="bfloat16", metadata={"help": "Number format of the models."})

    def shape(self, length: int) -> Shape:
        """Two layers, batch 1."""
        return Shape(length, self.projected_length, dtype=self.dtype)


@torch.inference_mode()
def peak_memory(args: Arguments, length: int) -> float:
    """MiB that a forward pass adds to what the process held; to be called in a process of its own."""
    torch.set_num_threads(args.threads)
    run = forward_pass("linformer", args.shape(length))
    run.func(run.args[0][:, :64])  # type: ignore[attr-defined]  # loads the kernels
    return added_memory(run)


def report(figure: str, value: float, goal: float, at_least: bool = True) -> None:
    met = value >= goal if at_least else value <= goal
    bound = "at least" if at_least else "at most"
    print(f"{figure:<62} {value:8.2f}   goal: {bound} {goal:<5g} {'met' if met else 'NOT MET'}", flush=True)


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    torch.set_num_threads(args.threads)
    print(", ".join(f"{name}: {value}" for name, value in environment().items()))
    print(f"2 layers of base size, k={args.projected_length}, {args.dtype}, batch 1")
    print(f"largest difference to RoBERTa with E = F = identity: {difference_to_roberta():.1e} (float32)")

    for length, attention, goal in ((4096, "sdpa", 1.6), (16384, "sdpa", 3.5), (8192, "eager", 10.0)):
        runs = {name: forward_pass(name, args.shape(length)) for name in ("linformer", f"roberta_{attention}")}
        ours, theirs = interleaved_medians(runs, args.repeats).values()
        print(f"n={length}: Linformer {ours:.3f} s, RoBERTa {attention} {theirs:.3f} s")
        report(f"speed against RoBERTa {attention}, n={length}", theirs / ours, goal)

    short, long = (forward_pass("linformer", args.shape(length)) for length in (4096, 16384))
    seconds = interleaved_medians({"short": short, "long": long}, args.repeats)
    report("time(16384) / time(4096)", seconds["long"] / seconds["short"], 4.4, at_least=False)
    runs = {"window": forward_pass("linformer_window", args.shape(16384)), "plain": long}
    seconds = interleaved_medians(runs, args.repeats)
    report("time with w=64, k=64 / without window, n=16384", seconds["window"] / seconds["plain"], 1.5, at_least=False)
    if sys.platform == "linux":
        memory = {}
        for length in (4096, 16384):
            with freed_memory_is_returned(), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                memory[length] = pool.submit(peak_memory, args, length).result()
        print(f"peak memory of a forward pass: {memory[4096]:.0f} MiB at 4096, {memory[16384]:.0f} MiB at 16384")
        report("memory(16384) / memory(4096)", memory[16384] / memory[4096], 4.2, at_least=False)

    try:
        difference = PyPIAttention.difference()
    except ImportError:
        print("PyPI linformer is not installed (pip install linformer==0.2.3): not compared")
        return
    print(f"largest difference to PyPI linformer with its weights: {difference:.1e} (float32)")
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        pair = PyPIAttention(args.shape(length))
        seconds = interleaved_medians({"ours": pair.run_ours, "theirs": pair.run_theirs}, 4 * args.repeats)
        report(f"speed against PyPI linformer's attention, n={length}", seconds["theirs"] / seconds["ours"], 1.0)


if __name__ == "__main__":
    main()
