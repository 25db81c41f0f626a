"""Folders that are replaced whole or not at all, and what a training needs to go on from one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deformops_models.console import UsageError, open_as_others

#: In a checkpoint folder, beside upstream's own files.
STATE = "training_state.pt"
CARD = "README.md"


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty temporary folder; renames it to `folder` when the block ends without an error.

    An earlier `folder` is moved aside first, so a process killed in between leaves both; `recover` then ends the work.
    """
    new, old = _beside(folder, "new"), _beside(folder, "old")
    for left_over in (new, old):
        shutil.rmtree(left_over, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        for file in new.iterdir():
            open_as_others(file)
            with file.open("rb+") as opened:
                os.fsync(opened.fileno())
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Ends or undoes what a killed `whole_folder` began."""
    new, old = _beside(folder, "new"), _beside(folder, "old")
    if old.exists() and not folder.exists():
        # The old one is moved aside only when the new one is complete.
        (new if new.exists() else old).rename(folder)
    for left_over in (new, old):
        shutil.rmtree(left_over, ignore_errors=True)


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}.{suffix}")


def save(
    folder: Path,
    model: nn.Module,
    processor: Any,
    state: dict[str, Any] | None = None,
    card: str | None = None,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Writes upstream's own files of the model and its image processor, `state` to go on from, and a model card.

    Args:
        folder: is replaced whole.
        model, processor: upstream's.
        state, card: are left out where None.
        weights: by name; None takes them from the model, which a sharded one has only parts of.

    Raises:
        UsageError: the disk is full or cannot be written.
    """
    try:
        with whole_folder(folder) as temporary:
            model.save_pretrained(temporary, state_dict=weights)
            processor.save_pretrained(temporary)
            if state is not None:
                torch.save(state, temporary / STATE)
            if card is not None:
                (temporary / CARD).write_text(card, encoding="utf-8")
    # torch and safetensors report a full disk as errors of their own.
    except Exception as error:
        raise UsageError(
            f"cannot write the checkpoint {folder}: {error}; the one before is intact: make room there and go on with "
            "--resume"
        ) from error


def load_state(folder: Path) -> dict[str, Any] | None:
    """Returns what `save` got as `state`, or None if there is no checkpoint yet.

    Raises:
        UsageError: the file is damaged.
    """
    if not folder.exists():
        return None
    try:
        return torch.load(folder / STATE, map_location="cpu", weights_only=True)
    # A damaged file makes the reader raise anything.
    except Exception as error:
        raise UsageError(f"cannot read {folder / STATE}: {error}; start again in another --out") from error


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Raises UsageError if another process is in such a block with the same folder."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    path = folder / ".lock"
    with path.open("w") as file:
        try:
            # Of this process alone: the workers that it forks may outlive it for a while.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"--out {folder}: another training runs there; wait for it, or choose another --out"
            ) from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def check_space(folder: Path, model: nn.Module, copies: int) -> None:
    """Raises UsageError unless `folder`'s disk has room for `copies` times the model's weights."""
    needed = copies * sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(
            f"--out {folder}: {free / 2**30:.2f} GiB are free there, the checkpoints need up to {needed / 2**30:.2f}"
        )
