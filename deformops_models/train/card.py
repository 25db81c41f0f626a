"""The model card that a checkpoint gets: what it is, how it was trained, what it reaches."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from deformops_models import __version__
from deformops_models.train.coco import Split

#: Rows of the table of results.
METRICS = ("AP", "AP50", "AP75")


def model_card(
    model: nn.Module, command: str, splits: Mapping[str, Split], metric: str, scores: Mapping[str, float | None]
) -> str:
    """Returns the Markdown of a README.md, with the front matter that the Hub reads.

    Args:
        model: as it is saved.
        command: that trained it.
        splits: "train" and "val".
        metric: "segm" or "bbox".
        scores: in percent, on the val split.
    """
    import transformers

    masks = metric == "segm"
    kind = "mask" if masks else "box"
    device = next(model.parameters()).device
    software = {
        "deformops-models": __version__, "transformers": transformers.__version__, "torch": torch.__version__,
    }  # fmt: skip
    rows = [
        ("parameters", f"{sum(p.numel() for p in model.parameters()):,}"),
        ("classes", ", ".join(splits["train"].id2label.values())),
        *((f"{name} images", _describe(split)) for name, split in splits.items()),
        *((f"{kind} {name} on val", f"{scores[name]:.2f} %") for name in METRICS if scores[name] is not None),
        ("hardware", torch.cuda.get_device_name(device) if device.type == "cuda" else device.type),
        ("software", ", ".join(f"{name} {version}" for name, version in software.items())),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    task = "image-segmentation" if masks else "object-detection"
    return f"""---
library_name: transformers
pipeline_tag: {task}
---

# {type(model).__name__}

Trained with `deformops-models finetune`; plain transformers loads it, where that package is not installed too.

| | |
| --- | --- |
{table}

```bash
{command}
```
"""


def _describe(split: Split) -> str:
    return f"{len(split.images)}" + (f" ({split.description})" if split.description else "")
