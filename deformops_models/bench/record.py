"""One CSV schema for every benchmark row."""

import csv
import datetime
import subprocess
from pathlib import Path

from deformops_models import __version__
from deformops_models.console import UsageError

COLUMNS = ["date", "commit", "gpu", "driver", "torch", "triton", "op", "preset", "distribution", "dtype"]
COLUMNS += ["provider", "metric", "unit", "median", "p20", "p80"]
NUMBERS = COLUMNS[-3:]

Row = dict[str, str | float]


def machine(commit: str | None = None) -> dict[str, str]:
    """What all rows of a run share; `commit` defaults to the checkout's HEAD, or to the installed version."""
    import torch
    import triton

    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit or _head() or __version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "driver": driver[0] if driver else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def _head() -> str:
    root = Path(__file__).resolve().parents[2]
    checkout = (root / "checkpoints.toml").is_file()
    return _output("git", "-C", str(root), "rev-parse", "--short", "HEAD") if checkout else ""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class Recorder:
    """Appends each row to a CSV file at once, so that an interrupted run keeps its rows, and holds them in `rows`."""

    def __init__(self, path: Path, fixed: dict[str, str]):
        if path.exists():
            read(path)
        self.path, self.fixed = path, fixed
        self.rows: list[Row] = []

    def add(self, median: float, p20: float | None = None, p80: float | None = None, **row: str) -> None:
        numbers = zip(NUMBERS, (median, median if p20 is None else p20, median if p80 is None else p80), strict=True)
        row = self.fixed | row | {name: f"{number:.4g}" for name, number in numbers}
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(row)
        self.rows.append(_typed(row))


def read(path: Path) -> list[Row]:
    """The rows of a CSV file; raises UsageError if there is none, it has other columns or is damaged."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames != COLUMNS:
                raise UsageError(f"{path} is no benchmark result: its columns are not {', '.join(COLUMNS)}")
            rows = []
            for row in reader:
                try:
                    rows.append(_typed(row))
                except (TypeError, ValueError):
                    raise UsageError(f"{path}: line {reader.line_num} is damaged: remove it") from None
            return rows
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise UsageError(f"{path} is no benchmark result: it is not text") from None


def _typed(row: dict[str, str]) -> Row:
    if None in row:
        raise ValueError("more columns than the header has")
    return row | {name: float(row[name]) for name in NUMBERS}
