"""How the benchmarks measure time and memory, and where they write it."""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers


def seconds(run: Callable[[], object], device: str = "cpu") -> float:
    """Seconds that `run` takes, on a GPU between CUDA events."""
    if not device.startswith("cuda"):
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


@torch.inference_mode()
def interleaved_medians(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each run, after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            taken = seconds(run)
            if turn:
                times[name].append(taken)
    return {name: statistics.median(taken) for name, taken in times.items()}


def resident_memory(name: str) -> float:
    """MiB that the process holds (`VmRSS`), or has held at most (`VmHWM`)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 2**10


def added_memory(run: Callable[[], object], device: str = "cpu") -> float:
    """MiB that `run` adds at most to what is held before; on a CPU of the process, and on Linux only."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = resident_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    run()
    return resident_memory("VmHWM") - before


@contextmanager
def freed_memory_is_returned() -> Iterator[None]:
    """Processes that are started meanwhile return what they free: kept memory would hide a part of peaks.

    This slows them down, and so it is not for measuring time.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    try:
        yield
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]


def environment(device: str = "cpu") -> dict[str, Any]:
    """Commit, versions and machine."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    machine = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "commit": git.stdout.strip() or "unknown",
        "machine": torch.cuda.get_device_name() if device.startswith("cuda") else machine,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


class Records:
    """Figures of configurations in a file of JSON lines, so that a killed run goes on where it was.

    Args:
        path: The file; it need not exist.
    """

    def __init__(self, path: str):
        self.path = Path(path)
        self.records = [json.loads(line) for line in self.path.open()] if self.path.exists() else []

    def missing(self, configurations: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those configurations that no record has."""
        return [c for c in configurations if not any(_has(record, c) for record in self.records)]

    def add(self, configuration: dict[str, Any], figures: dict[str, Any], device: str = "cpu") -> None:
        """Writes the figures of a configuration, in place of older ones, and where they were measured."""
        self.records = [record for record in self.records if not _has(record, configuration)]
        self.records.append({**configuration, **figures, **environment(device)})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".tmp-{self.path.name}")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in self.records), "utf-8")
        os.replace(temporary, self.path)


def _has(record: dict[str, Any], configuration: dict[str, Any]) -> bool:
    return configuration == {name: record.get(name) for name in configuration}
