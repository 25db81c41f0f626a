"""Multi-scale deformable attention on GPU kernels, and `patch(model)` for the detectors that use it."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a checkout kernels/ and patches/ lie beside this package; in an installed wheel, inside it.
_here = Path(__file__).resolve().parent
if not (_here / "kernels").is_dir():
    __path__.append(str(_here.parent))

_EXPORTS = {
    "msda": "api",
    "multi_scale_deformable_attention": "api",
    "deformable_attention": "api",
    "Backend": "backend",
    "Resolution": "backend",
    "resolve": "backend",
    "call_counts": "backend",
    "MultiScaleDeformAttn2d": "layers",
    "patch": "patching",
    "unpatch": "patching",
    "patched": "patching",
    "report": "patching",
    "PatchError": "patching",
    "PARTS": "patching",
    "Mask2Former": "hub",
    "DeformableDETR": "hub",
    "DINO": "hub",
    "from_pretrained": "hub",
    "checkpoints": "hub",
}
__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from deformops_models.api import deformable_attention, msda, multi_scale_deformable_attention
    from deformops_models.backend import Backend, Resolution, call_counts, resolve
    from deformops_models.hub import DINO, DeformableDETR, Mask2Former, checkpoints, from_pretrained
    from deformops_models.layers import MultiScaleDeformAttn2d
    from deformops_models.patching import PARTS, PatchError, patch, patched, report, unpatch


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
