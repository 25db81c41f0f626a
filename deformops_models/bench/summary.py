"""What a run says at its end, from its rows alone."""

import math
import statistics
from collections.abc import Iterable

from deformops_models.bench.peers import PROVIDERS
from deformops_models.bench.presets import LINEAR, Case
from deformops_models.bench.record import Row
from deformops_models.console import table

#: The `op` of rows of `bench --family`, and what it times, with its name in print.
FAMILY = "family"
FAMILY_METRICS = {"forward_backward_ms": "forward and backward", "inference_ms": "inference"}

Medians = dict[tuple[Case, str, str], float]


def medians(rows: Iterable[Row]) -> Medians:
    """By case, provider and metric; a later row replaces an earlier one."""
    return {
        (Case(*(row[name] for name in Case._fields)), row["provider"], row["metric"]): row["median"] for row in rows
    }


def cases(found: Medians, metric: str) -> list[Case]:
    """The cases in which `ours` has this metric, in the order of the rows."""
    return [case for case, provider, name in found if (provider, name) == ("ours", metric)]


def summary(rows: Iterable[Row]) -> str:
    """Tables of device and host times, of how they grow, of whole detectors and families; those that have rows."""
    found = medians(rows)
    tables = (_device(found), _host(found), _growth(found), _models(found), _families(found))
    return "\n\n".join(table(cells) for cells in tables if len(cells) > 1)


def _device(found: Medians) -> list[tuple[str, ...]]:
    providers = {provider for _, provider, metric in found if metric == "forward_us"}
    peers = [name for name in PROVIDERS if name in providers and name != "ours"]
    cells = [("FORWARD / BACKWARD", "", "", "", "OURS, µs", *(f"{peer}, ×" for peer in peers))]
    for case in cases(found, "forward_us"):
        forward, backward = (found[case, "ours", metric] for metric in ("forward_us", "backward_us"))
        ratios = []
        for peer in peers:
            times = [found.get((case, peer, metric)) for metric in ("forward_us", "backward_us")]
            ratios.append("-" if None in times else f"{times[0] / forward:.2f} / {times[1] / backward:.2f}")
        cells.append((*case, f"{forward:,.4g} / {backward:,.4g}", *ratios))
    return cells


def _host(found: Medians) -> list[tuple[str, ...]]:
    metrics = ("host_forward_us", "host_grad_us", "host_both_us")
    cells = [("HOST TIME, µs", "", "", "", "PROVIDER", "FORWARD", "WITH GRADIENTS", "AND BACKWARD", "FORWARD / BARE")]
    for case, provider, metric in found:
        if metric != metrics[0]:
            continue
        times = [found.get((case, provider, name)) for name in metrics]
        bare = found.get((case, "bare_launch", metric))
        ratio = "-" if bare is None else f"{times[0] / bare:.2f}"
        cells.append((*case, provider, *("-" if t is None else f"{t:,.4g}" for t in times), ratio))
    return cells


def _growth(found: Medians) -> list[tuple[str, ...]]:
    cells = [("LINEAR IN", "PROVIDER", "METRIC", "TIME GROWS AS", "OFF THE LINE BY AT MOST")]
    titles = {"linear_q": "queries", "linear_lk": "levels · points", "linear_d": "channels"}
    for provider in dict.fromkeys(provider for case, provider, _ in found if case.preset in LINEAR):
        for sweep, title in titles.items():
            for metric in ("forward_us", "backward_us"):
                times = {
                    case.work.corner_elements: time
                    for (case, who, name), time in found.items()
                    if (who, name) == (provider, metric) and case.preset.rstrip("0123456789") == sweep
                }
                if len(times) > 2:
                    exponent, deviation = linearity(times)
                    cells.append((title, provider, metric, f"work^{exponent:.2f}", f"{100 * deviation:.1f} %"))
    return cells


def _models(found: Medians) -> list[tuple[str, ...]]:
    """Each provider's training step, inference, compiling and peak memory, and how many times upstream's they are."""
    columns = {
        "STEP, ms": ("train_step", "step_ms"), "INFERENCE, ms": ("inference", "inference_ms"),
        "COMPILING STEP, s": ("train_step", "compile_s"), "COMPILING INFERENCE, s": ("inference", "compile_s"),
        "PEAK, MiB": ("train_step", "peak_mib"),
    }  # fmt: skip
    whole = [(case, provider, metric) for case, provider, metric in found if (case.op, metric) in columns.values()]
    present = {(case.op, metric) for case, _, metric in whole}
    keys = {title: key for title, key in columns.items() if key in present}
    cells = [("MODEL", "PROVIDER", *(cell for title in keys for cell in (title, "")))]
    for case, provider in dict.fromkeys((case._replace(op=""), provider) for case, provider, _ in whole):
        row = []
        for op, metric in keys.values():
            ours, theirs = (found.get((case._replace(op=op), who, metric)) for who in (provider, "upstream"))
            row.append("-" if ours is None else f"{ours:,.4g}")
            row.append(f"{ours / theirs:.2f} ×" if ours and theirs else "")
        cells.append((case.preset, provider, *row))
    return cells


def ratios(found: Medians) -> dict[str, dict[str, float]]:
    """By family and metric: time patched over time unpatched."""
    by_family: dict[str, dict[str, float]] = {}
    for (case, provider, metric), before in found.items():
        after = found.get((case, "ours", metric))
        if case.op == FAMILY and provider == "upstream" and metric in FAMILY_METRICS and after is not None:
            by_family.setdefault(case.preset, {})[metric] = after / before
    return by_family


def _families(found: Medians) -> list[tuple[str, ...]]:
    """The ratios of families, and their median."""
    by_family = ratios(found)
    cells = [("PATCHED / UNPATCHED", *(title.upper() for title in FAMILY_METRICS.values()))]
    for name, values in by_family.items():
        cells.append((name, *(f"{values[m]:.2f}" if m in values else "-" for m in FAMILY_METRICS)))
    if by_family:
        columns = ([values[m] for values in by_family.values() if m in values] for m in FAMILY_METRICS)
        cells.append(("median", *(f"{statistics.median(column):.2f}" if column else "-" for column in columns)))
    return cells


def linearity(times: dict[int, float]) -> tuple[float, float]:
    """How times by work grow.

    Returns:
        The exponent b of the best a·work^b, and the largest relative deviation from the best straight line.
    """
    logs = [[math.log(x) for x in axis] for axis in (times.keys(), times.values())]
    slope, intercept = statistics.linear_regression(list(times), list(times.values()))
    deviation = max(abs(time / (intercept + slope * work) - 1) for work, time in times.items())
    return statistics.linear_regression(*logs).slope, deviation
