"""Draws the README's picture from a CSV of benchmarks/operators.py, and from nothing else.

python benchmarks/plot.py benchmarks/results/operators-h200.csv docs/speed.png
"""

import argparse
import csv
from pathlib import Path

import matplotlib.pyplot as plt

PRESETS = {"encoder": "DETR encoder", "m2f1024": "Mask2Former\npixel decoder", "decoder": "decoder, batch 4",
           "rtdetr640": "decoder, batch 16"}  # fmt: skip
PROVIDERS = {"ours": "deformops_models", "deformops": "deformops + torch", "transformers": "transformers"}
COLORS = ("#1b7f5c", "#c98a1b", "#8a8f98")
METRICS = {"forward_us": "forward", "backward_us": "backward"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    with args.results.open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["op"] == "deformable_attention" and r["dtype"] == args.dtype]
    times = {(r["preset"], r["provider"], r["metric"]): float(r["median"]) for r in rows}
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for axis, (metric, title) in zip(axes, METRICS.items(), strict=True):
        for i, ((provider, name), color) in enumerate(zip(PROVIDERS.items(), COLORS, strict=True)):
            heights = [times[preset, provider, metric] for preset in PRESETS]
            bars = axis.bar([x + 0.27 * (i - 1) for x in range(len(PRESETS))], heights, 0.25, label=name, color=color)
            labels = [f"{height:,.0f}" if height >= 20 else f"{height:.1f}" for height in heights]
            axis.bar_label(bars, labels, fontsize=7, padding=1)
        axis.set_yscale("log")
        axis.set_xticks(range(len(PRESETS)), PRESETS.values(), fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel("µs, logarithmic")
        axis.margins(y=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    facts = rows[0]
    figure.suptitle(
        f"Deformable attention from offsets and logits, {args.dtype}, {facts['gpu']}, torch {facts['torch']}",
        fontsize=10,
    )
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.picture, dpi=130)


if __name__ == "__main__":
    main()
