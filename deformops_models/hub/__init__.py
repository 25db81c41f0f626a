"""Published checkpoints and their loaders: an alias, a repo id or local files in, a patched upstream model out."""

from pathlib import Path
from typing import Any

from torch import nn

from deformops_models.hub.mmdet import DINO
from deformops_models.hub.table import (
    SHIPPED,
    Checkpoint,
    CheckpointError,
    check_name,
    checkpoints,
    find,
    find_checkpoint,
    local_name,
)
from deformops_models.hub.transformers import DeformableDETR, Mask2Former, Transformers

__all__ = [
    "DINO",
    "SHIPPED",
    "Checkpoint",
    "CheckpointError",
    "DeformableDETR",
    "Mask2Former",
    "Transformers",
    "checkpoints",
    "find_checkpoint",
    "from_pretrained",
    "local_name",
]


def from_pretrained(name_or_path: str | Path, *args: Any, **kwargs: Any) -> nn.Module:
    """Returns any detector that a loader of this package knows, patched, in eval mode.

    Args:
        name_or_path: alias of checkpoints.toml, Hub repo id, or local folder; or mmdet's config file, with the weights
            as second argument.
        args, kwargs: as for the `from_pretrained` that it calls, of `DINO` for mmdet and `Mask2Former` for others.

    Raises:
        CheckpointError: as there, and for a name that is none.
    """
    check_name(name_or_path)
    path, row = Path(name_or_path).expanduser(), find(str(name_or_path))
    mmdet = any(path.glob("*.py")) and not (path / "config.json").is_file() if path.is_dir() else path.suffix == ".py"
    if mmdet or (not path.is_dir() and row is not None and row.framework == "mmdet"):
        return DINO.from_pretrained(name_or_path, *args, **kwargs)
    if args:
        raise TypeError(f"{args[0]!r}: only mmdet's loader takes a second argument, its weights; name the others")
    return Transformers.from_pretrained(name_or_path, **kwargs)
