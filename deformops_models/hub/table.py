"""checkpoints.toml, and what both kinds of loader share."""

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from deformops_models.backend import Backend, as_backend


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be found, reached or read. The message is one line and says what to do."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One table of checkpoints.toml. What is not known is None or empty."""

    alias: str
    framework: str
    model_type: str
    task: str
    dataset: str | None = None
    backbone: str | None = None
    source: str
    num_queries: int | None = None
    num_feature_levels: int | None = None
    #: Sampling points per level; a tuple where levels differ.
    num_points: int | tuple[int, ...] | None = None
    #: transformers: Hub repo, and the commit that the other facts describe (loading does not pin it).
    repo_id: str | None = None
    revision: str | None = None
    #: mmdet: config file below mmdet's `.mim` folder, weights, and the first 8 hex digits of their SHA-256.
    config: str | None = None
    url: str | None = None
    sha256_prefix: str | None = None
    formats: tuple[str, ...] = ()
    license: str | None = None
    #: Percent, as published; whose numbers they are and where.
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_of: str | None = None
    published: str | None = None
    num_labels: int | None = None
    with_box_refine: bool = False
    two_stage: bool = False
    dilation: bool = False
    #: `size` arguments of an image processor: at which the metric was measured, and what the Hub repo presets.
    eval_size: Mapping[str, int] | None = None
    hub_size: Mapping[str, int] | None = None
    note: str | None = None

    @property
    def loader(self) -> str:
        """Name of the class of `hub` that loads it."""
        if self.framework == "mmdet":
            return "DINO"
        return {"mask2former": "Mask2Former", "deformable_detr": "DeformableDETR"}.get(self.model_type, "Transformers")


#: Models that the package itself holds, by name.
SHIPPED = {"shapes-tiny": Path(__file__).resolve().parents[1] / "shapes_tiny"}


def local_name(name: str) -> str:
    """Returns the folder of a model that the package holds; every other name as it is."""
    folder = SHIPPED.get(name)
    return str(folder) if folder is not None and (folder / "config.json").is_file() else name


@functools.cache
def checkpoints() -> tuple[Checkpoint, ...]:
    """Returns every row of checkpoints.toml, in its order."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    here = Path(__file__).resolve().parents[1]
    # Installed, the file lies inside the package; in a checkout, at the root.
    path = next(p for p in (here / "checkpoints.toml", here.parent / "checkpoints.toml") if p.is_file())
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["checkpoint"]
    return tuple(Checkpoint(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows)


def find_checkpoint(alias_or_repo: str) -> Checkpoint:
    """Returns the row with this alias or Hub repo id, in upper or lower case.

    Raises:
        CheckpointError: there is none; the message names the nearest aliases.
    """
    if row := find(alias_or_repo):
        return row
    if alias_or_repo in SHIPPED:
        raise CheckpointError(
            f"this build of deformops-models holds no weights of {alias_or_repo}: name another checkpoint, or train it "
            f"by `deformops-models finetune --model {alias_or_repo}` and pass its folder best/"
        )
    near = difflib.get_close_matches(alias_or_repo.lower(), [row.alias for row in checkpoints()], n=3, cutoff=0.5)
    hint = f"nearest: {', '.join(near)}" if near else "`deformops-models checkpoints` lists them"
    raise CheckpointError(f"unknown checkpoint {alias_or_repo!r}; {hint}")


def find(name: str) -> Checkpoint | None:
    """Returns the row with this alias or Hub repo id, in upper or lower case, if there is one."""
    for row in checkpoints():
        if name.lower() in (row.alias, row.repo_id and row.repo_id.lower()):
            return row
    return None


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Returns the dtype of this name, or of a short one such as "bf16"; raises ValueError if there is none."""
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    found = getattr(torch, short.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}: use a torch.dtype or its name, such as 'bfloat16'")
    return found


def package(error: ModuleNotFoundError) -> str:
    """Returns the name of the package that is missing."""
    return (error.name or str(error)).partition(".")[0]


def first_line(error: Exception) -> str:
    """Returns what an error says, shortened to one line."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def target(
    backend: Backend | str | None, device: torch.device | str | None
) -> tuple[Backend | None, torch.device | None]:
    """Returns both as such; raises ValueError if one is not known."""
    chosen = as_backend(backend)
    try:
        return chosen, None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not known: use 'cpu', 'cuda' or 'cuda:1'") from error


def check_name(name_or_path: str | Path) -> None:
    """Raises CheckpointError for what can be no name; an empty one would be the working folder."""
    if not isinstance(name_or_path, str | Path) or not str(name_or_path):
        raise CheckpointError(f"{name_or_path!r} is no checkpoint: give an alias, a repo id or a path")


def ready(model: nn.Module, backend: Backend | None, device: torch.device | None) -> nn.Module:
    """Returns the loaded model, moved, in eval mode and patched; raises CheckpointError if nothing can be patched."""
    from deformops_models.patching import PatchError, patch

    if device is not None:
        model.to(device)
    try:
        return patch(model.eval(), backend=backend)
    except PatchError as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines()[:2])
        framework = type(model).__module__.partition(".")[0]
        raise CheckpointError(f"{reason}: load it with {framework} itself") from error
