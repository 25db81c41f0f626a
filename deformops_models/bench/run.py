"""The command: which cases and providers are timed, the loop over them, and what it writes."""

import argparse
import contextlib
import itertools
import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deformops_models import console
from deformops_models.backend import resolve
from deformops_models.bench import compiled, convergence, families, measure, models, plot, record, steps
from deformops_models.bench.peers import PROVIDERS, by_default, refusal
from deformops_models.bench.presets import DISTRIBUTIONS, LINEAR, OPS, PRESETS, Case, Problem
from deformops_models.bench.summary import summary
from deformops_models.console import UsageError

#: Fewer than these compile as they come: starting a process takes as long as compiling a kernel.
_WORTH_A_POOL = 8
_MOST_PROCESSES = 16


def run(args: argparse.Namespace) -> int:
    """Times what is asked for, writes `results.csv` and the pictures, and prints a summary.

    Returns:
        0, or 1 if an error of this package's own results exceeded its bound, or a detector raised one.

    Raises:
        UsageError: a name is unknown, nothing is left to time, or there is no GPU.
    """
    if args.plot_only:
        for picture in plot.draw(record.read(Path(args.plot_only)), console.output_folder(args.out)):
            print(picture)
        return 0
    if args.compile and not args.model:
        raise UsageError("--compile: only whole detectors are compiled: name them with --model")
    if args.convergence:
        _check_gpu()
        return convergence.run(console.output_folder(args.out))
    if args.model or args.family:
        return _run_detectors(args)
    rows, left_out = select(args)
    recorder = _begin(args, left_out)
    compile_ahead(rows)
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        failures = time_all(rows, recorder)
    return report(recorder, failures)


def _run_detectors(args: argparse.Namespace) -> int:
    if args.family:
        measure, known = families.measure, families.PROVIDERS
        chosen, left_out = choose("--family", args.family, models.FAMILIES, models.FAMILIES)
    else:
        measure, known = {
            None: (steps.measure, steps.PROVIDERS),
            "inference": (compiled.measure_inference, compiled.PROVIDERS),
            "training": (compiled.measure_training, compiled.PROVIDERS),
        }[args.compile]
        chosen, left_out = choose("--model", args.model, models.MODELS, models.PUBLISHED)
    providers = list(_named("--provider", args.provider, dict.fromkeys(known)) or known)
    recorder = _begin(args, left_out)
    return report(recorder, steps.run(chosen, measure, recorder, providers))


def _begin(args: argparse.Namespace, left_out: Sequence[str]) -> record.Recorder:
    """Checks what a run needs, and says what is left out of it."""
    _check_gpu()
    for line in left_out:
        print(f"left out: {line}")
    return record.Recorder(console.output_folder(args.out) / "results.csv", record.machine(args.commit))


def choose(
    option: str, names: Sequence[str], known: Mapping[str, models.Workload], everything: Iterable[str]
) -> tuple[dict[str, models.Workload], list[str]]:
    """The named detectors, "all" being those of `everything` that are installed; and a line for each that is not.

    Raises:
        UsageError: a name is unknown or what it needs is not installed, or "all" leaves nothing.
    """
    chosen, left_out = {}, []
    for name in _named(option, names, known | {"all": None}):
        for each in everything if name == "all" else (name,):
            problem = known[each].absent()
            if problem and name != "all":
                raise UsageError(f"{option} {name}: {problem}")
            if problem:
                left_out.append(f"{each}, {problem}")
            else:
                chosen[each] = known[each]
    if not chosen:
        raise UsageError(f"{option}: nothing is left to time: {'; '.join(left_out)}")
    return chosen, left_out


def select(args: argparse.Namespace) -> tuple[list[tuple[Case, str]], list[str]]:
    """The cases and providers to time, in order; and a line for each provider that is left out altogether."""
    presets = LINEAR if args.linear else _named("--preset", args.preset, PRESETS | {"all": None})
    presets = PRESETS if "all" in presets else presets
    dtypes = dict.fromkeys(_named("--dtype", args.dtype, console.DTYPES | {"autocast": "autocast"}).values())
    ops = _named("--op", args.op, dict.fromkeys(OPS)) or OPS[1 if args.linear else 0 :]
    distributions = _named("--distribution", args.distribution, dict.fromkeys(DISTRIBUTIONS))
    providers = _named("--provider", args.provider, PROVIDERS)
    rows, reasons = [], {}
    for name, preset in presets.items():
        for dtype in dtypes or preset.dtypes:
            both = preset.uniform and dtype == "bfloat16"
            for distribution in distributions or DISTRIBUTIONS[: 2 if both else 1]:
                for op, provider in itertools.product(ops, providers or PROVIDERS):
                    case = Case(name, distribution, dtype, op)
                    if not providers and not by_default(provider, case):
                        continue
                    if reason := refusal(provider, case):
                        reasons.setdefault(provider, {})[reason] = None
                    else:
                        rows.append((case, provider))
    timed = {provider for _, provider in rows}
    left_out = [f"{provider}, {' or '.join(why)}" for provider, why in reasons.items() if provider not in timed]
    if not rows:
        raise UsageError(f"nothing is left to time: {'; '.join(left_out)}")
    return rows, left_out


def _named(option: str, names: Sequence[str], known: dict[str, Any]) -> dict[str, Any]:
    """The entries of `known` that are named, in the order of `names`."""
    for name in names:
        if name not in known:
            raise UsageError(f"{option}: unknown {name!r}: use {', '.join(known)}")
    return {name: known[name] for name in names}


def _check_gpu() -> None:
    if not torch.cuda.is_available():
        raise UsageError(
            "bench times kernels on an NVIDIA GPU and torch sees none here: run it where `deformops-models doctor` "
            "lists one; --plot-only CSV draws pictures of existing results anywhere"
        )
    try:
        resolve("cuda", torch.bfloat16)
    except RuntimeError as error:
        raise UsageError(str(error)) from None


def compile_ahead(rows: Iterable[tuple[Case, str]]) -> None:
    """Fills the compilers' caches from several processes, before anything is timed."""
    wanted = {_code(*row): row for row in rows if PROVIDERS[row[1]].compiles}
    processes = min(_MOST_PROCESSES, (os.cpu_count() or 1) - 1)
    if len(wanted) < _WORTH_A_POOL or processes < 2:
        return
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    try:
        for done, _ in enumerate(pool.map(_compile, wanted.values()), 1):
            print(f"\rcompiling ahead {done}/{len(wanted)}", end="", flush=True)
        print()
    finally:
        pool.shutdown(cancel_futures=True)


def _code(case: Case, name: str) -> tuple:
    """What compiled code depends on: sizes only where torch compiles it, locations never."""
    work = case.work
    sizes = case.preset if name == "transformers_compiled" else None
    return name, case.op, case.dtype, work.points, work.heads, work.channels, work.coordinates, sizes


def _compile(row: tuple[Case, str]) -> None:
    case, name = row
    provider = PROVIDERS[name]
    # What fails here fails again when it is timed, and is reported there.
    with contextlib.suppress(Exception), provider.mode():
        problem = Problem.random(case.work, *case[1:])
        function = provider.build(problem)
        function(*problem.operands)
        measure.differentiate(function, problem.leaves(), problem.grad)


def time_all(rows: Sequence[tuple[Case, str]], recorder: record.Recorder, device: str = "cuda") -> list[str]:
    """Records errors and times of every row and prints a line for each; returns the lines of the rows that failed."""
    failures, number = [], itertools.count(1)
    for case, group in itertools.groupby(rows, key=lambda row: row[0]):
        problem = Problem.random(case.work, *case[1:], device)
        truth = measure.exact(problem)
        for _, name in group:
            title = f"{' '.join(case)} {name}"
            try:
                passed, text = _time(problem, truth, case, name, recorder)
            except Exception as error:
                if PROVIDERS[name].gated and "does not have a deterministic implementation" not in str(error):
                    raise
                passed, text = True, f"skipped: {' '.join(str(error).split())[:200]}"
            print(f"[{next(number)}/{len(rows)}] {title}: {text}", flush=True)
            if not passed:
                failures.append(f"{title}: {text}")
            # Captured graphs leave their memory pools behind.
            torch.cuda.empty_cache()
    return failures


def _time(
    problem: Problem, truth: dict[str, Tensor], case: Case, name: str, recorder: record.Recorder
) -> tuple[bool, str]:
    """Records one row; returns whether it may be timed, and what to print."""
    provider = PROVIDERS[name]
    row = case._asdict() | {"provider": name}
    with provider.mode():
        function = provider.build(problem)
        errors = measure.errors(function, problem, truth)
        too_far = measure.beyond(errors, problem) if provider.gated else {}
        measured = []
        if not too_far:
            measured = list(
                measure.clocks(function, problem, host=case.preset == "host", differentiable=provider.differentiable)
            )
    for result, error in errors.items():
        recorder.add(error, **row, metric=f"error_{result}", unit="1")
    for metric, unit, quantiles in measured:
        recorder.add(*quantiles, **row, metric=metric, unit=unit)
    if too_far:
        return False, "beyond its bound: " + ", ".join(f"error_{result} {e:.2g}" for result, e in too_far.items())
    times = ", ".join(f"{metric.rpartition('_')[0]} {q[0]:,.4g} {unit}" for metric, unit, q in measured)
    return True, f"{times}, error {max(errors.values()):.1e}"


def report(recorder: record.Recorder, failures: Sequence[str]) -> int:
    """Prints the summary of this run and what failed, draws the pictures of its file; returns the exit code."""
    print(f"\n{summary(recorder.rows)}\n\n{recorder.path}")
    try:
        for picture in plot.draw(record.read(recorder.path), recorder.path.parent):
            print(picture)
    except UsageError as error:
        print(f"no pictures: {error}")
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0
