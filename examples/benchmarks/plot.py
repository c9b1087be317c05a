# /// script
# dependencies = ["linformer_hf[benchmark]"]
# ///
"""Draws what `benchmark.py` has measured as in the paper's Figure 2, prints its Table 3, and says which goals are met.

    python examples/benchmarks/plot.py --input_file runs/benchmark.jsonl --output_dir runs/plots

`time.png` has seconds of a forward pass against length for every model, `saved.png` the time and memory that Linformer
saves (ratios to RoBERTa with sdpa and with eager attention; memory by the largest batch where that was measured, else
by what a pass of one text adds to the weights).
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import matplotlib


matplotlib.use("Agg")

from matplotlib import pyplot
from measuring import Records

from linformer_hf import training


OURS = ("linformer", "linformer_window")
TRANSFORMERS = ("roberta_sdpa", "roberta_eager")


@dataclass
class Arguments:
    """What is drawn."""

    input_file: str = field(metadata={"help": "JSON lines of benchmark.py."})
    output_dir: str | None = field(
        default=None, metadata={"help": "Folder for the plots; none are drawn if not given."}
    )
    dtype: str = field(default="bfloat16", metadata={"help": "Which number format to show."})
    projected_length: int = field(default=128, metadata={"help": "k of the goals, and of peers that have one."})


class Figures:
    """The figures of one number format, found by measure, model, length and k."""

    def __init__(self, records: list[dict[str, Any]], dtype: str, projected_length: int):
        self.records = [record for record in records if record["dtype"] == dtype]
        self.projected_length = projected_length

    def find(self, measure: str, model: str, length: int, k: int | None = None) -> list[dict[str, Any]]:
        """The records, those of most layers first."""
        ks = (0, self.projected_length if k is None else k)
        found = [
            record
            for record in self.records
            if (record["measure"], record["model"], record["length"]) == (measure, model, length)
            and record["projected_length"] in ks
        ]
        return sorted(found, key=lambda record: -record["layers"])

    def value(self, measure: str, name: str, model: str, length: int, k: int | None = None) -> float | None:
        """A figure, of most layers."""
        return next((record[name] for record in self.find(measure, model, length, k) if name in record), None)

    def ratio(
        self, measure: str, name: str, above: tuple[str, int], below: tuple[str, int], k: int | None = None
    ) -> float | None:
        """How many times the figure of one model and length is that of another, both with as many layers."""
        for one in self.find(measure, *above, k):
            for other in self.find(measure, *below, k):
                if one["layers"] == other["layers"] and one.get(name) and other.get(name):
                    return one[name] / other[name]
        return None

    def saved(self, model: str, than: str, length: int, k: int) -> tuple[float | None, float | None]:
        """Time and memory that a Linformer saves, as ratios."""
        ours, theirs = (model, length), (than, length)
        texts = self.ratio("largest_batch", "texts", ours, theirs, k)
        memory = texts or self.ratio("memory", "mib", theirs, ours, k)
        return self.ratio("forward", "seconds", theirs, ours, k), memory

    def all(self, name: str, measure: str = "forward") -> list[Any]:
        """All values of a field, in order."""
        return sorted({record[name] for record in self.records if record["measure"] == measure})


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A cell of a table."""
    return "" if value is None else f"{value:.{digits}f}{unit}"


def table_3(figures: Figures) -> list[str]:
    """Time and memory saved, for each length and k; against sdpa, and against eager attention behind the slash."""
    columns = [("linformer", k) for k in figures.all("projected_length") if k] + [("linformer_window", 0)]
    names = [f"k={k}" if k else "w=64, k=64" for _, k in columns]
    lines = [f"| n | {' | '.join([f'time, {n}' for n in names] + [f'memory, {n}' for n in names])} |"]
    lines.append("| --- " * (2 * len(columns) + 1) + "|")
    for length in figures.all("length"):
        cells: list[list[str]] = [[], []]
        for model, k in columns:
            pairs = zip(*(figures.saved(model, than, length, k) for than in TRANSFORMERS), strict=True)
            for cell, pair in zip(cells, pairs, strict=True):
                cell.append(" / ".join(number(value, 1, "x") or "-" for value in pair))
        lines.append(f"| {length} | {' | '.join(cells[0] + cells[1])} |")
    return lines


def peers(figures: Figures) -> list[str]:
    """Seconds of every model at every length, or that it failed."""
    lengths = figures.all("length")
    lines = [f"| model | {' | '.join(f'n={length}' for length in lengths)} |", "| --- " * (len(lengths) + 1) + "|"]
    notes = []
    for model in figures.all("model"):
        for k in sorted({r["projected_length"] for r in figures.records if r["model"] == model}):
            cells = []
            for length in lengths:
                record = next(iter(figures.find("forward", model, length, k)), {})
                cells.append(number(record.get("seconds"), 3) or ("failed" if "failed" in record else ""))
                if "failed" in record:
                    notes.append(f"{model}, n={length}: {record['failed']}")
                if record.get("heads", 12) != 12:
                    notes.append(f"{model}, n={length}: with {record['heads']} heads, as many as fit in memory")
            lines.append(f"| {model}{f', k={k}' if k else ''} | {' | '.join(cells)} |")
    return [*lines, "", *(f"- {note}" for note in notes)]


def goals(figures: Figures) -> list[str]:
    """The goals for two cores, and what was measured."""
    rows: list[tuple[str, float | None, str, float]] = []

    def faster(than: str, length: int, goal: float, measure: str = "forward", what: str = "times as fast as") -> None:
        ratio = figures.ratio(measure, "seconds", (than, length), ("linformer", length))
        rows.append((f"{what} {than}, n={length}", ratio, ">=", goal))

    lengths = figures.all("length")
    for length in (length for length in lengths if length >= 4096):
        floors = (("linformer", "floor", 1.30), ("linformer_compiled", "floor", 1.15))
        for name, floor, goal in (*floors, ("linformer_window", "floor_window", 1.30)):
            ratio = figures.ratio("forward", "seconds", (name, length), (floor, length))
            rows.append((f"{name}: time / unavoidable products, n={length}", ratio, "<=", goal))
    for length, goal in ((2048, 4.0), (8192, 15.0), (16384, 20.0)):
        faster("roberta_eager", length, goal)
    for length in (4096, 16384, 65536):
        flops = figures.ratio("forward", "flops", ("roberta_sdpa", length), ("linformer", length))
        faster("roberta_sdpa", length, 0.9 * (flops or 0))
    for than, goal in (("roberta_eager", 3.0), ("roberta_sdpa", 1.0), ("modernbert_sdpa", 1.0)):
        faster(than, 2048, goal, "training_step", "masked-LM step: times as fast as")
    for length in (length for length in lengths if length >= 1024):
        for model in figures.all("model"):
            if not model.startswith(("linformer", "floor", "roberta")):
                faster(model, length, 1.2 if model.startswith("pypi") else 1.0)
    for model in OURS:
        for measure, name in (("forward", "seconds"), ("memory", "mib")):
            growth = figures.ratio(measure, name, (model, 65536), (model, 4096))
            rows.append((f"{model}: {name} at 65536 / at 4096", growth, "<=", 17.6))
        for length in figures.all("length", "padding"):
            share = figures.ratio("padding", "seconds", (f"{model}_padded", length), (model, length))
            rows.append((f"{model}: half padding / none, n={length}", share, "<=", 0.65))
        for measure, what, length, goal in (
            ("memory", "forward pass", 65536, 1.5),
            ("training_memory", "training step", 16384, 6.0),
        ):
            mib = figures.value(measure, "mib", model, length)
            rows.append((f"{model}: GiB of a {what} at {length}", mib and mib / 1024, "<=", goal))
    lines = ["| figure | measured | goal | |", "| --- | --- | --- | --- |"]
    for figure, value, sign, goal in rows:
        if value is not None:
            met = value <= goal if sign == "<=" else value >= goal
            lines.append(f"| {figure} | {value:.2f} | {sign} {goal:.2f} | {'met' if met else 'not met'} |")
    return lines


def draw_times(figures: Figures, path: str) -> None:
    """Seconds against length, one line for each model."""
    figure, axes = pyplot.subplots(figsize=(8, 5.5))
    for model in figures.all("model"):
        points = [(n, figures.value("forward", "seconds", model, n)) for n in figures.all("length")]
        points = [point for point in points if point[1]]
        if points and model not in ("floor_window", "linformer_compiled"):
            style = {"linewidth": 2.5} if model in OURS else {"linewidth": 1, "linestyle": "--"}
            axes.plot(*zip(*points, strict=True), label=model, marker="o", markersize=3, **style)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds of a forward pass")
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def draw_saved(figures: Figures, path: str) -> None:
    """Time and memory saved against length, one line for each k and kind of RoBERTa."""
    figure, both = pyplot.subplots(1, 2, figsize=(11, 4.5))
    columns = [("linformer", k) for k in figures.all("projected_length") if k] + [("linformer_window", 0)]
    for place, (axes, label) in enumerate(zip(both, ("time saved", "memory saved"), strict=True)):
        for than, style in zip(TRANSFORMERS, ("-", ":"), strict=True):
            for color, (model, k) in enumerate(columns):
                points = [(n, figures.saved(model, than, n, k)[place]) for n in figures.all("length")]
                points = [point for point in points if point[1]]
                if points:
                    name = f"{'k=' + str(k) if k else 'w=64, k=64'}, against {than}"
                    axes.plot(
                        *zip(*points, strict=True), style, color=f"C{color}", marker="o", markersize=3, label=name
                    )
        axes.set(yscale="log", xlabel="tokens", ylabel=f"{label} (ratio)")
        axes.set_xscale("log", base=2)
        axes.axhline(1, color="gray", linewidth=0.5)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> dict[str, list[str]]:
    (args,) = training.parse_arguments(Arguments, argv=argv)
    records = Records(args.input_file).records
    figures = Figures(records, args.dtype, args.projected_length)
    if not figures.all("length"):
        raise ValueError(
            f"--input_file {args.input_file} has no forward passes in {args.dtype}: run benchmark.py, or choose "
            "another --dtype"
        )
    machines = sorted({f"{r['machine']}, torch {r['torch']}, transformers {r['transformers']}" for r in records})
    commits = sorted({record["commit"] for record in records})
    print(f"{'; '.join(machines)}; commit {', '.join(commits)}; {args.dtype}\n")
    tables = {"saved": table_3(figures), "seconds": peers(figures), "goals": goals(figures)}
    for title, lines in tables.items():
        print(f"{title}\n")
        print("\n".join(lines) + "\n")
    if args.output_dir:
        with training.atomic_directory(args.output_dir, merge=True) as folder:
            draw_times(figures, folder / "time.png")
            draw_saved(figures, folder / "saved.png")
    return tables


if __name__ == "__main__":
    main(sys.argv[1:])
