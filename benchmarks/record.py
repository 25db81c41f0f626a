"""One CSV schema for every benchmark row, and the clocks."""

import csv
import datetime
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton

COLUMNS = ["date", "commit", "gpu", "driver", "torch", "triton", "op", "preset", "distribution", "dtype"]
COLUMNS += ["provider", "metric", "unit", "median", "p20", "p80"]


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class Recorder:
    """Appends rows to a CSV file and prints them; the file has a header once."""

    def __init__(self, path: Path, commit: str | None = None):
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
        self.path = path
        self.fixed = {
            "date": datetime.date.today().isoformat(),
            "commit": commit or _output("git", "rev-parse", "--short", "HEAD"),
            "gpu": torch.cuda.get_device_name(),
            "driver": driver[0] if driver else "",
            "torch": torch.__version__,
            "triton": triton.__version__,
        }

    def add(self, median: float, p20: float | None = None, p80: float | None = None, **row: str) -> None:
        numbers = {"median": median, "p20": median if p20 is None else p20, "p80": median if p80 is None else p80}
        row = self.fixed | row | {name: f"{number:.4g}" for name, number in numbers.items()}
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(row)
        names = ("op", "preset", "distribution", "dtype", "provider", "metric")
        print(*(row.get(name, "") for name in names), row["median"], row["unit"], flush=True)


def quantiles(samples: list[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    samples = sorted(samples)
    return tuple(samples[min(len(samples) - 1, int(len(samples) * q))] for q in (0.5, 0.2, 0.8))


def device_time(function: Callable[[], object], repeats: int = 30) -> tuple[float, float, float]:
    """Device time of one call in µs, by replaying a CUDA graph of it, so that no launch latency is counted.

    The default stream cannot be captured: call it, and make all of autograd's history, on another one.
    """
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        function()
    graph.replay()
    torch.cuda.synchronize()
    samples = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3)
    return quantiles(samples)


def host_time(function: Callable[[], object], repeats: int = 200) -> tuple[float, float, float]:
    """Time in µs that a call keeps the Python thread; the device is idle at its start."""
    for _ in range(10):
        function()
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        samples.append((time.perf_counter() - start) * 1e6)
    return quantiles(samples)


def peak_memory(function: Callable[[], object]) -> float:
    """MiB that a call needs on top of what is allocated before it."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
