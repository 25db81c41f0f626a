"""What the subcommands share: one-line errors, tables, checked arguments, files that appear whole or not at all."""

import importlib.util
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Accepted by --dtype: torch's own names and the usual short ones.
DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}


class UsageError(Exception):
    """Something that the user has to change; shown as one line, exit code 2."""


def missing(extra: str, modules: Iterable[str]) -> str | None:
    """Names the first of `modules` that is not installed and the pip command that brings it, or returns None."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed: pip install 'deformops-models[{extra}]'"
    return None


def require(extra: str, *modules: str) -> None:
    """Raises UsageError with the pip command if one of `modules` is not installed."""
    if problem := missing(extra, modules):
        raise UsageError(problem)


def pick_device(name: str | None) -> "torch.device":
    """Returns the named device after trying it, or CUDA if there is any, else the CPU."""
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {name!r}: use cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise UsageError(f"device {name!r}: no CUDA GPU can be used here; leave --device out or use --device cpu")
        if (device.index or 0) >= count:
            raise UsageError(f"device {name!r}: this machine has {count} CUDA GPU(s), numbered from 0")
        return device
    try:
        torch.empty(1, device=device).item()
    # Some kinds of device are in packages of their own.
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):
        raise UsageError(f"device {name!r} cannot be used here: use cpu, cuda or cuda:N") from None
    return device


def output_folder(path: str) -> Path:
    """Makes the folder with its parents and checks that it can be written."""
    if not path:
        raise UsageError("--out is empty: name a folder, or . for the current one")
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except FileExistsError:
        raise UsageError(f"--out {path}: this is a file, a folder is needed") from None
    except OSError as error:
        raise UsageError(f"--out {path}: cannot write there: {error.strerror}") from None


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path` to write to; renames it to `path` when the block ends without an error."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem[:40]}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        open_as_others(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def open_as_others(file: Path) -> None:
    """Gives the file the permissions of any other new one; temporary ones and safetensors' are the owner's alone."""
    umask = os.umask(0)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def clear_left_overs(path: Path) -> None:
    """Removes what a killed `whole_file` left beside `path`."""
    for left_over in path.parent.glob(f".{path.stem}-*{path.suffix}"):
        left_over.unlink()


def table(rows: Iterable[Iterable[object]], indent: str = "") -> str:
    """Aligns rows of cells into columns, left-justified; the last column is never padded."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = max(map(len, cells), default=0)
    widths = [max(len(row[c]) for row in cells if c < len(row)) for c in range(columns)]
    return "\n".join(
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))).rstrip()
        for row in cells
    )
