# /// script
# dependencies = ["linformer_hf[benchmark]"]
# ///
"""Times Linformer beside every model that one might take instead, and measures their memory.

    python examples/benchmarks/benchmark.py --output_file runs/benchmark.jsonl
    python examples/benchmarks/plot.py --input_file runs/benchmark.jsonl --output_dir runs/plots

Measures, of base-size models (768 wide, 12 heads, 3072 in the feed-forward; `peers.py` says how each is set up):

- `forward`: an inference pass;
- `padding`: the same of 8 texts of which half is padding, and of 8 full ones, Linformers only;
- `training_step`: a masked-LM step, forward, backward and AdamW;
- `memory`, `training_memory`: MiB that a pass, or a step with gradient checkpointing, adds to weights and optimizer;
- `largest_batch`: how many texts fit in a pass, on a GPU.

All models of one length are timed in turns in one process: median and quartiles. Memory is measured in a process for
each model. What a model cannot do is recorded with its reason. A run that is killed goes on where it was. `floor` is
the time of the matrix products that Linformer cannot do without, as plain ones, and `floor_window` that of the window.
"""

import multiprocessing
import resource
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measuring import Records, added_memory, environment, freed_memory_is_returned, seconds
from peers import (
    MODELS,
    PROJECTED,
    WIDTH,
    PyPIAttention,
    Shape,
    build,
    difference_to_roberta,
    forward_pass,
    training_step,
    transformer_heads_that_fit,
    unavoidable_products,
)
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from linformer_hf import training


FLOORS = {"floor": "linformer", "floor_window": "linformer_window"}
MEASURES = ("forward", "padding", "training_step", "memory", "training_memory", "largest_batch")
PADDED_BATCH = 8


@dataclass
class Arguments:
    """What is measured."""

    output_file: str = field(metadata={"help": "JSON lines, one per figure; those in it are not measured again."})
    models: list[str] = field(
        default_factory=lambda: [*MODELS, *FLOORS], metadata={"help": f"Of {', '.join([*MODELS, *FLOORS])}."}
    )
    measures: list[str] = field(
        default_factory=lambda: ["forward", "memory"], metadata={"help": f"Of {', '.join(MEASURES)}."}
    )
    lengths: list[int] = field(
        default_factory=lambda: [512, 1024, 2048, 4096, 8192, 16384], metadata={"help": "n, tokens of a text."}
    )
    projected_lengths: list[int] = field(
        default_factory=lambda: [128], metadata={"help": "k of Linformers; the window has its own, 64."}
    )
    dtypes: list[str] = field(default_factory=lambda: ["bfloat16"], metadata={"help": "Number formats."})
    num_hidden_layers: int = field(
        default=3,
        metadata={"help": "All layers cost the same, but for ModernBERT, which has full attention in each third."},
    )
    batch_size: int = field(default=1, metadata={"help": "Texts at once."})
    repeats: int = field(default=5, metadata={"help": "Turns after one to warm up; a model has fewer where they take"})
    max_seconds: float = field(
        default=60.0, metadata={"help": "longer than this; where the first one takes longer, it is the only one."}
    )
    threads: int = field(default=2, metadata={"help": "CPU threads."})
    device: str = field(default="cuda" if torch.cuda.is_available() else "cpu", metadata={"help": "cpu or cuda."})

    def __post_init__(self) -> None:
        for name, allowed in (("models", [*MODELS, *FLOORS]), ("measures", MEASURES)):
            if unknown := set(getattr(self, name)) - set(allowed):
                raise ValueError(f"--{name} {' '.join(sorted(unknown))}: choose among {', '.join(allowed)}")
        if "largest_batch" in self.measures and not self.device.startswith("cuda"):
            raise ValueError(f"--measures largest_batch needs --device cuda, not {self.device}: use `memory` here")


def free_memory(device: str) -> float:
    """Bytes that may still be used."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info()[0]
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 2**10


def prepare(args: Arguments) -> None:
    """Sets up a process of its own: too large a model is to fail there, and not to end other processes."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if not args.device.startswith("cuda"):
        limit = int(0.9 * free_memory(args.device))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, or the reason why the process ended."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *args).result()
        except BrokenProcessPool:
            return {"failed": "the process was ended, probably for want of memory"}


def reason(error: BaseException) -> dict[str, str]:
    """What a record says of a failure."""
    message = str(error).strip()
    return {"failed": f"{type(error).__name__}: {message.splitlines()[0][:200] if message else ''}"}


def prepared_run(measure: str, model: str, shape: Shape) -> Callable[..., Any]:
    """What is timed or whose memory is measured."""
    if model in FLOORS:
        return unavoidable_products(FLOORS[model], shape)
    if measure.startswith("training"):
        return training_step(model, shape, checkpointing=measure == "training_memory")
    run = forward_pass(model.removesuffix("_padded"), shape)
    if not model.endswith("_padded"):
        return run
    lengths = torch.linspace(0.05, 0.95, shape.batch_size, device=shape.device) * shape.length
    mask = (torch.arange(shape.length, device=shape.device) < lengths[:, None]).long()
    return lambda: run(attention_mask=mask)


def gradients(measure: str) -> Any:
    """The context in which a measure runs."""
    return torch.inference_mode(not measure.startswith("training"))


def flops(model: str, shape: Shape) -> int:
    """Of an inference pass."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        build(model, shape).eval()(inputs_embeds=torch.zeros(shape.batch_size, shape.length, WIDTH))
    return counter.get_total_flops()


def times(args: Arguments, measure: str, shapes: dict[str, Shape]) -> dict[str, dict[str, Any]]:
    """Median and quartiles of each model's seconds, all of them in turns."""
    prepare(args)
    runs: dict[str, Callable[..., Any]] = {}
    results: dict[str, dict[str, Any]] = {}
    taken: dict[str, list[float]] = {}
    allowed: dict[str, int] = {}
    with gradients(measure):
        for name, shape in tqdm(shapes.items(), desc=f"{measure}, warming up", leave=False):
            try:
                run = prepared_run(measure, name.split("@")[0], shape)
                first = seconds(run, args.device)  # loads the kernels, compiles
                if first < args.max_seconds:
                    first = seconds(run, args.device)
            except Exception as error:
                results[name] = reason(error)
                continue
            runs[name], taken[name] = run, [first]
            allowed[name] = max(1, min(args.repeats, int(args.max_seconds / first)))
        for turn in tqdm(range(1, args.repeats), desc=f"{measure}, turns", leave=False):
            for name, run in runs.items():
                if turn < allowed[name]:
                    taken[name].append(seconds(run, args.device))
    for name, values in taken.items():
        low, median, high = statistics.quantiles(values, n=4, method="inclusive") if values[1:] else values * 3
        results[name] = {"seconds": median, "quartiles": [low, high], "repeats": len(values)}
        if measure == "forward" and name.startswith(("linformer", "roberta")) and "compiled" not in name:
            results[name]["flops"] = flops(name.split("@")[0], shapes[name])
    return results


def memory(args: Arguments, measure: str, model: str, shape: Shape) -> dict[str, Any]:
    """MiB that a pass or a step adds at most."""
    prepare(args)
    try:
        with gradients(measure):
            run = prepared_run(measure, model, shape)
            run()  # loads the kernels, makes the optimizer's state
            return {"mib": added_memory(run, args.device)}
    except Exception as error:
        return reason(error)


def largest_batch(args: Arguments, measure: str, model: str, shape: Shape) -> dict[str, Any]:
    """How many texts fit in a pass: doubled until they do not, and then halved in between."""
    prepare(args)
    fits, too_many = 0, None
    while too_many is None or too_many - fits > max(1, fits // 50):
        batch_size = 2 * fits or 1 if too_many is None else (fits + too_many) // 2
        try:
            with torch.inference_mode():
                prepared_run(measure, model, shape._replace(batch_size=batch_size))()
                torch.cuda.synchronize()
            fits = batch_size
        except torch.OutOfMemoryError:
            too_many = batch_size
        except Exception as error:
            return reason(error)
        torch.cuda.empty_cache()
    return {"texts": fits}


def shapes_of(args: Arguments, measure: str, length: int, dtype: str) -> dict[str, Shape]:
    """The models of one comparison, those with a k once for each as `model@k`."""
    shapes = {}
    for model in args.models:
        floor = FLOORS.get(model)
        if (measure != "forward" and floor) or (measure == "padding" and not model.startswith("linformer")):
            continue
        batch_size = PADDED_BATCH if measure == "padding" else args.batch_size
        heads = {}
        if model == "roberta_eager":
            heads = {"heads": transformer_heads_that_fit(length, 0.7 * free_memory(args.device) / batch_size)}
        for k in args.projected_lengths if (floor or model) in PROJECTED else [0]:
            shape = Shape(length, k, args.num_hidden_layers, dtype, batch_size, args.device, **heads)
            if measure != "padding":
                shapes[f"{model}@{k}"] = shape
            elif model != "linformer_compiled":
                shapes |= {f"{model}@{k}": shape, f"{model}_padded@{k}": shape}
    return shapes


def configuration(measure: str, name: str, shape: Shape) -> dict[str, Any]:
    """What a record says of what was measured."""
    return {"measure": measure, "model": name.split("@")[0], **shape._asdict()}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    (args,) = training.parse_arguments(Arguments, argv=argv)
    torch.set_num_threads(args.threads)
    records = Records(args.output_file)
    print(", ".join(f"{name}: {value}" for name, value in environment(args.device).items()))
    print(f"{args.num_hidden_layers} layers of base size, batch {args.batch_size}")
    print(f"largest difference to RoBERTa with E = F = identity: {difference_to_roberta():.1e} (float32)")
    if "pypi_linformer" in args.models:
        print(f"largest difference to PyPI linformer's attention: {PyPIAttention.difference():.1e} (float32)")
    groups = [(m, n, dtype) for m in args.measures for dtype in args.dtypes for n in args.lengths]
    for measure, length, dtype in tqdm(groups, desc="measures and lengths"):
        shapes = shapes_of(args, measure, length, dtype)
        wanted = {name: configuration(measure, name, shape) for name, shape in shapes.items()}
        missing = [name for name in wanted if records.missing([wanted[name]])]
        if not missing:
            continue
        if measure in ("forward", "padding", "training_step"):
            # one that is missing is timed with all others again: ratios are of one process
            figures = in_own_process(times, args, measure, shapes)
            results = dict.fromkeys(shapes, figures) if "failed" in figures else figures
        else:
            function = largest_batch if measure == "largest_batch" else memory
            with freed_memory_is_returned():
                results = {
                    n: in_own_process(function, args, measure, n.split("@")[0], shapes[n]) for n in tqdm(missing)
                }
        for name, result in results.items():
            records.add(wanted[name], result, args.device)
    return {"records": records.records}


if __name__ == "__main__":
    main(sys.argv[1:])
