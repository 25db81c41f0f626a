"""`bench --convergence`: whether a training with patched modules goes as one with upstream's own.

A small Mask2Former learns generated shapes from one seed several times, as `finetune` trains it, in bf16 with its loss
in float32: unpatched, unpatched from weights that are moved by up to a bfloat16's rounding, and patched. How far the
unpatched curves are from one another is what rounding alone does. Two of them would make that a matter of luck: of ten
unpatched trainings on a CPU, taken by threes, the third was in 5 % of cases more than twice as far from the first as
the second was; taken by sixes, the last was so in 0.2 %.
"""

import csv
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from deformops_models.console import require, whole_file
from deformops_models.patching import patch

UNPATCHED = 5
RUNS = ("upstream", *(f"upstream, rounded otherwise {i}" for i in range(1, UNPATCHED)), "ours")
STEPS = 200
_IMAGES, _SIZE, _BATCH = 64, 128, 4
_SMOOTH = 10  # steps that are averaged before curves are compared


def run(folder: Path, device: str = "cuda") -> int:
    """Writes convergence.csv and .png into `folder`; returns 0 if the patched curve is within twice the noise."""
    require("finetune", "transformers", "torchvision", "pycocotools", "tqdm")
    require("bench", "matplotlib")
    curves = losses(STEPS, torch.device(device))
    with whole_file(folder / "convergence.csv") as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", *RUNS))
        writer.writerows((step, *row) for step, row in enumerate(zip(*curves, strict=True), 1))
    noise, ours = distances(curves)
    verdict = "within" if ours <= 2 * noise else "BEYOND"
    text = f"the patched curve is {ours:.2%} off unpatched ones, these {noise:.2%} off each other: {verdict} twice that"
    _draw(curves, text, folder / "convergence.png")
    print(f"{text}\n{folder / 'convergence.csv'}\n{folder / 'convergence.png'}")
    return 0 if ours <= 2 * noise else 1


def losses(steps: int, device: torch.device) -> list[list[float]]:
    """The loss of every step of each of `RUNS`."""
    batches = _batches(device)
    curves = []
    for i, name in enumerate(RUNS):
        model = _model(device, rounding=i % UNPATCHED)
        if name == "ours":
            patch(model)
        curves.append(_train(model, batches, steps))
        print(f"{name}: loss {curves[-1][0]:.3f} at first, {np.mean(curves[-1][-_SMOOTH:]):.3f} at last", flush=True)
    return curves


def distances(curves: Sequence[Sequence[float]]) -> tuple[float, float]:
    """How far all curves but the last are from one another, and the last from them.

    Both are the root mean square, over all pairs, of the logarithm of the smoothed curves' ratio, which for close
    curves is their relative difference.
    """
    kernel = np.ones(_SMOOTH) / _SMOOTH
    *unpatched, ours = (np.log(np.convolve(curve, kernel, "valid")) for curve in curves)
    noise = [a - b for a, b in itertools.combinations(unpatched, 2)]
    return tuple(float(np.sqrt(np.mean(np.square(pairs)))) for pairs in (noise, [ours - a for a in unpatched]))


def _batches(device: torch.device) -> list[dict[str, list[Tensor] | Tensor]]:
    """All images once, in batches on the device."""
    from deformops_models.train.coco import TrainingImages, read_split
    from deformops_models.train.shapes import write

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), "train", _IMAGES, _SIZE, seed=0)
        split = read_split(folder, "train", masks=True)
        images = TrainingImages(
            split, masks=True, size=_SIZE, augment=False, mean=[127.5] * 3, std=[63.75] * 3, seed=0
        )  # fmt: skip
        samples = [images[0, i] for i in range(_IMAGES)]
    groups = [samples[i : i + _BATCH] for i in range(0, _IMAGES, _BATCH)]
    return [
        {
            "pixel_values": torch.stack([sample["image"] for sample in group]).to(device),
            "mask_labels": [sample["masks"].to(device, torch.float32) for sample in group],
            "class_labels": [sample["labels"].to(device) for sample in group],
        }
        for group in groups
    ]


def _model(device: torch.device, rounding: int) -> nn.Module:
    from transformers import Mask2FormerForUniversalSegmentation

    from deformops_models.train.shapes import SHAPES
    from deformops_models.train.tasks import CONFIGS

    torch.manual_seed(0)
    model = Mask2FormerForUniversalSegmentation(CONFIGS["shapes-tiny"](num_labels=len(SHAPES)))
    if rounding:
        torch.manual_seed(rounding)
        half = torch.finfo(torch.bfloat16).eps / 2
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + (2 * torch.rand_like(parameter) - 1) * half)
    compute = model.get_loss_dict

    def compute_in_float32(**kwargs: Any) -> Any:
        kwargs = tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, kwargs)
        with torch.autocast(device.type, enabled=False):
            return compute(**kwargs)

    model.get_loss_dict = compute_in_float32  # as the patched loss computes in any case
    return model.to(device).train()


def _train(model: nn.Module, batches: Sequence[dict], steps: int) -> list[float]:
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=device.type == "cuda")
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**batches[step % len(batches)]).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found).tolist()


def _draw(curves: Sequence[Sequence[float]], title: str, picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, curve in zip(RUNS, curves, strict=True):
        rounded = name not in ("upstream", "ours")
        axes.plot(
            range(1, len(curve) + 1), curve, ":" if rounded else "-", linewidth=1.3,
            color="tab:green" if name == "ours" else "gray",
            label=None if name in RUNS[2:-1] else name.removesuffix(" 1"),
        )  # fmt: skip
    axes.set(xlabel="step", ylabel="loss")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    with whole_file(picture) as temporary:
        figure.savefig(temporary, dpi=110)
