"""Pictures of `deformable_attention` in bfloat16 and of whole detectors, from the rows of a results file alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deformops_models.bench.models import MODELS
from deformops_models.bench.presets import DISTRIBUTIONS, PRESETS, Case, Preset
from deformops_models.bench.record import Row
from deformops_models.bench.steps import PARTS
from deformops_models.bench.summary import FAMILY, FAMILY_METRICS, Medians, cases, medians, ratios
from deformops_models.console import UsageError, require, whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {
    "ours": "#1b7f5c",
    "ours_deterministic": "#7cc4a4",
    "deformops": "#c98a1b",
    "deformops_native": "#e3b868",
    "deformops_softmax": "#8c5f10",
    "mmcv": "#4f6db3",
    "transformers": "#8a8f98",
    "transformers_compiled": "#4b4f57",
    "upstream": "#8a8f98",
    "ours_attention": "#7cc4a4",
    "upstream_compiled": "#4b4f57",
    "ours_compiled": "#4f6db3",
    "upstream_graphs": "#2b2e33",
    "ours_graphs": "#7a5ba8",
}
_PART_COLORS = dict(
    zip(
        (*PARTS, _REST := "rest"),
        ("#4f6db3", "#1b7f5c", "#8fb5e0", "#b3261e", "#e3b868", "#8a8f98", "#4b4f57", "#d9dce1"),
        strict=True,
    )
)
#: Of whole detectors, in the order of the bars: what is written above a bar of parts.
_SHORT = {
    "upstream": "upstream", "ours_attention": "attention\nonly", "ours": "ours",
    "upstream_compiled": "upstream\ncompiled", "ours_compiled": "ours\ncompiled",
    "upstream_graphs": "upstream\ngraphs", "ours_graphs": "ours\ngraphs",
}  # fmt: skip
#: Op, metric, and how many of its units make the title's.
_PANELS = {
    "training step, ms": ("train_step", "step_ms", 1),
    "inference, ms": ("inference", "inference_ms", 1),
    "peak memory in training, GiB": ("train_step", "peak_mib", 1024),
}
_DIRECTIONS = {"forward_us": "forward", "backward_us": "backward"}
_BYTES = 2  # of a bfloat16
_PLAIN = {"frameon": False, "fontsize": 9}
#: µs on an H200 of kernels that do nothing else with the encoder's corner rows, uniform (docs/kernels.md).
_FLOORS = {
    "forward_us": (("reads each row once, uniform locations", 165, "--"),),
    "backward_us": (("adds each row in bfloat16", 452, "--"), ("adds each row in float32", 750, ":")),
}

Heights = dict[Case, float]


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes speedup.png, memory.png, roofline.png, models.png and families.png into `folder`, whichever have rows.

    Later rows replace earlier ones.

    Raises:
        UsageError: matplotlib is missing, or the rows hold nothing to draw.
    """
    require("bench", "matplotlib")
    pictures = _operator_pictures(rows) | _model_pictures(rows) | _family_pictures(rows)
    if not pictures:
        raise UsageError("no row times ours as deformable_attention in bfloat16, or a whole detector")
    paths = []
    for name, figure in pictures.items():
        paths.append(folder / f"{name}.png")
        with whole_file(paths[-1]) as temporary:
            figure.savefig(temporary, dpi=120)
    return paths


def _operator_pictures(rows: Sequence[Row]) -> dict[str, "Figure"]:
    fused = [
        r for r in rows if r["op"] == "deformable_attention" and r["dtype"] == "bfloat16" and r["preset"] in PRESETS
    ]
    found = medians(fused)
    shown = sorted(cases(found, "backward_us"), key=_position)
    if not shown:
        return {}
    gpu = fused[-1]["gpu"]
    pictures = {
        "speedup": _speedup(found, shown),
        "memory": _memory(found, shown),
        "roofline": _roofline(found, shown, "H200" in gpu),
    }
    for figure in pictures.values():
        figure.suptitle(f"deformable_attention, bfloat16, {gpu}, torch {fused[-1]['torch']}", fontsize=11)
    return pictures


def _model_pictures(rows: Sequence[Row]) -> dict[str, "Figure"]:
    """The training step of each detector as bars of its parts, its inference and its memory; what has rows of these."""
    from matplotlib.figure import Figure

    whole = [row for row in rows if row["op"] in ("train_step", "inference") and row["provider"] in _SHORT]
    found = medians(whole)
    present = {(case.op, metric) for case, _, metric in found}
    panels = {title: panel for title, panel in _PANELS.items() if panel[:2] in present}
    if not panels:
        return {}
    timed = {(case.op, case._replace(op="")) for case, _, metric in found if metric in ("step_ms", "inference_ms")}
    order = list(dict.fromkeys(case._replace(op="") for case, _, _ in found))
    order.sort(key=lambda case: [*MODELS, case.preset].index(case.preset))
    in_parts = any(metric.startswith("part_") for _, _, metric in found)
    figure = Figure(figsize=(max(11, 5.5 * len(order)), 5), layout="constrained")
    widths = [1.5 if metric == "step_ms" else 1 for _, metric, _ in panels.values()]
    axes = figure.subplots(1, len(panels), width_ratios=widths, squeeze=False)[0]
    drawn = {}
    for axis, (title, (op, metric, unit)) in zip(axes, panels.items(), strict=True):
        shown = [case for case in order if (op, case) in timed]
        for place, case in enumerate(shown):
            key = case._replace(op=op)
            heights = {name: found[key, name, metric] / unit for name in _SHORT if (key, name, metric) in found}
            for i, (provider, height) in enumerate(heights.items()):
                width = 0.84 / len(heights)
                x = place + (i - (len(heights) - 1) / 2) * width
                if metric == "step_ms" and in_parts:
                    times = {part: found.get((key, provider, f"part_{part}_ms"), 0.0) for part in PARTS}
                    # Medians of parts do not add up to the whole's, and some rows have no parts.
                    top = max(height, sum(times.values()))
                    _parts(axis, x, width * 0.9, times | {_REST: top - sum(times.values())})
                    axis.annotate(
                        f"{_SHORT[provider]}\n{_number(height)}", (x, top), (0, 3), textcoords="offset points",
                        ha="center", fontsize=8,
                    )  # fmt: skip
                else:
                    drawn[provider] = axis.bar(x, height, width * 0.9, color=_COLORS[provider])
                    axis.bar_label(drawn[provider], [_number(height)], fontsize=8, padding=2)
        axis.set_xticks(range(len(shown)), [case.preset.replace("_", "\n", 1) for case in shown], fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    if in_parts:
        for part in reversed(_PART_COLORS):
            axes[0].bar(0, 0, color=_PART_COLORS[part], label=part)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside left center", **_PLAIN)
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower right", ncols=len(_SHORT), **_PLAIN)
    figure.suptitle(f"bf16 autocast, {whole[-1]['gpu']}, torch {whole[-1]['torch']}", fontsize=11)
    return {"models": figure}


def _parts(axis: "Axes", x: float, width: float, times: dict[str, float]) -> None:
    """A bar of bars."""
    bottom = 0.0
    for part, time in times.items():
        axis.bar(x, time, width, bottom=bottom, color=_PART_COLORS[part])
        bottom += time


def _family_pictures(rows: Sequence[Row]) -> dict[str, "Figure"]:
    """Bars of each family's time patched over unpatched, and a line where they are equal."""
    from matplotlib.figure import Figure

    found = ratios(medians(rows))
    if not found:
        return {}
    names = sorted(found, key=lambda name: found[name].get("forward_backward_ms", 0.0), reverse=True)
    figure = Figure(figsize=(8, 1.2 + 0.36 * len(names)), layout="constrained")
    axis = figure.add_subplot()
    right = max(1.0, *(ratio for by_metric in found.values() for ratio in by_metric.values())) + 0.02
    for i, (metric, color) in enumerate(zip(FAMILY_METRICS, ("#1b7f5c", "#4f6db3"), strict=True)):
        heights = [found[name][metric] for name in names if metric in found[name]]
        places = [k + (0.2 if i == 0 else -0.2) for k, name in enumerate(names) if metric in found[name]]
        axis.barh(places, heights, 0.38, color=color, label=FAMILY_METRICS[metric])
        for place, height in zip(places, heights, strict=True):
            axis.text(right, place, f"{height:.2f}", va="center", fontsize=7)
    axis.axvline(1.0, color="#4b4f57", linewidth=1, linestyle="--")
    axis.set_ylim(-0.6, len(names) - 0.4)
    axis.spines[["top", "right"]].set_visible(False)
    timed = [row for row in rows if row["op"] == FAMILY]
    last, dtypes = timed[-1], {row["preset"]: row["dtype"] for row in timed}
    # The title says what the others are.
    labels = [f"{name} ({dtypes[name]})" if dtypes[name] == "float32" else name for name in names]
    axis.set_yticks(range(len(names)), labels, fontsize=8)
    axis.set_xlabel("time patched / unpatched (less is better)")
    _legend(figure, axis)
    axis.set_title(f"bfloat16 autocast, {last['gpu'] or 'CPU'}, torch {last['torch']}", fontsize=11)
    return {"families": figure}


def _position(case: Case) -> tuple[int, int]:
    return list(PRESETS).index(case.preset), DISTRIBUTIONS.index(case.distribution)


def _series(found: Medians, shown: Sequence[Case], metric: str) -> dict[str, Heights]:
    """Medians by provider and case, for the providers that have any."""
    by_provider = {p: {c: found[c, p, metric] for c in shown if (c, p, metric) in found} for p in _COLORS}
    return {provider: heights for provider, heights in by_provider.items() if heights}


def _speedup(found: Medians, shown: Sequence[Case]) -> "Figure":
    figure, axes = _panels(2, found, shown)
    for axis, (metric, direction) in zip(axes, _DIRECTIONS.items(), strict=True):
        series = _series(found, shown, metric)
        ours = series.pop("ours")
        ratios = {name: {case: time / ours[case] for case, time in times.items()} for name, times in series.items()}
        _logarithmic(axis)
        axis.axhline(1, color=_COLORS["ours"], linewidth=1.5)
        _bars(axis, shown, ratios, base=1)
        axis.set_ylabel(f"{direction}: device time ÷ ours\n(above 1: ours is faster)", fontsize=9)
    _legend(figure, axes[0])
    return figure


def _memory(found: Medians, shown: Sequence[Case]) -> "Figure":
    figure, (axis,) = _panels(1, found, shown)
    _logarithmic(axis)
    _bars(axis, shown, _series(found, shown, "peak_mib"))
    axis.set_ylabel("peak memory of forward + backward\nbeside the operands, MiB", fontsize=9)
    _legend(figure, axis)
    return figure


def _roofline(found: Medians, shown: Sequence[Case], floors: bool) -> "Figure":
    figure, axes = _panels(2, found, shown)
    for axis, (metric, direction) in zip(axes, _DIRECTIONS.items(), strict=True):
        lines = {}
        rates = {
            name: {case: _rate(case.work, time) for case, time in times.items()}
            for name, times in _series(found, shown, metric).items()
        }
        _bars(axis, shown, rates)
        for label, time, style in _FLOORS[metric] if floors else ():
            limit = _rate(PRESETS["encoder"], time)
            line = axis.axhline(limit, color="#b3261e", linestyle=style, linewidth=1.2, zorder=0)
            lines[f"a bare kernel that {label}"] = line
        if lines:
            # Above the panel, where no bar is.
            axis.legend(lines.values(), lines.keys(), loc="lower right", bbox_to_anchor=(1, 1), ncols=2, **_PLAIN)
        axis.set_ylabel(f"{direction}: bytes of the corner rows\nof all samples ÷ device time, TB/s", fontsize=9)
    _legend(figure, axes[0])
    return figure


def _rate(work: Preset, time: float) -> float:
    """TB/s at which the corner rows of all samples are taken in `time` µs."""
    return work.corner_elements * _BYTES / time / 1e6


def _panels(count: int, found: Medians, shown: Sequence[Case]) -> tuple["Figure", Sequence["Axes"]]:
    """Axes one above the other, as wide as their bars need."""
    from matplotlib.figure import Figure

    bars = len(_series(found, shown, "backward_us")) * len(shown)
    figure = Figure(figsize=(min(16, max(8, 2 + 0.3 * bars)), 1 + 3.2 * count), layout="constrained")
    return figure, figure.subplots(count, 1, squeeze=False)[:, 0]


def _logarithmic(axis: "Axes") -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _bars(axis: "Axes", shown: Sequence[Case], series: dict[str, Heights], base: float = 0) -> None:
    """One group of bars per case, of the providers that it has, each with its number."""
    width = 0.84 / max(len(series), 1)
    for place, case in enumerate(shown):
        present = [name for name, heights in series.items() if case in heights]
        for i, name in enumerate(present):
            x, height = place + (i - (len(present) - 1) / 2) * width, series[name][case]
            bars = axis.bar(x, height - base, width * 0.92, bottom=base, color=_COLORS[name])
            (label,) = axis.bar_label(
                bars, [_number(height)], fontsize=8, padding=2, rotation=90 if len(series) > 4 else 0
            )
            label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.8})
    labels = [c.preset if c.distribution == "local" else f"{c.preset}\n{c.distribution}" for c in shown]
    axis.set_xticks(range(len(shown)), labels, fontsize=9)
    axis.set_xlim(-0.6, len(shown) - 0.4)
    axis.margins(y=0.2)
    axis.spines[["top", "right"]].set_visible(False)
    for name in series:
        axis.bar(0, 0, bottom=base, color=_COLORS[name], label=name)


def _number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _legend(figure: "Figure", axis: "Axes") -> None:
    """Below all panels, so that it covers no bar."""
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4, **_PLAIN)
