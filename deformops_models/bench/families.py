"""`bench --family`: forward and backward pass and inference of a detector of every family, patched and unpatched."""

import math
from collections.abc import Iterator, Sequence

from deformops_models.backend import call_counts
from deformops_models.bench.record import Recorder
from deformops_models.bench.steps import Bench
from deformops_models.bench.summary import FAMILY, FAMILY_METRICS

PROVIDERS = ("upstream", "ours")
# Where little is gained, what disturbs a host has to meet both alike: they take turns call by call.
_ROUNDS = 36


def measure(name: str, title: str, bench: Bench, recorder: Recorder, providers: Sequence[str]) -> Iterator[str]:
    """Loss, times and memory; what has no finite loss or did not run its kernels fails and is not timed."""
    row = {"op": FAMILY, "preset": name, "distribution": "random", "dtype": bench.detector.dtype}
    passed = []
    for provider in providers:
        before = call_counts.copy()
        with bench.patched(provider):
            bench.model.train()
            loss = bench.values(7)["loss"]
            launches = (call_counts - before)["msda_forward"]
            bench.model.eval()
            bench.infer()
        counts = call_counts - before
        recorder.add(loss, **row, provider=provider, metric="loss", unit="1")
        if provider == "ours":
            recorder.add(launches, **row, provider=provider, metric="kernel_calls", unit="1")
        problem = bench.idle(provider, counts) or (None if math.isfinite(loss) else f"loss is {loss}")
        if problem:
            yield f"{provider}: {problem}"
        else:
            passed.append(provider)
    for (metric, text), clock in zip(FAMILY_METRICS.items(), (bench.losses, bench.inferences), strict=True):
        found = bench.interleaved(passed, clock, 1, _ROUNDS, settle=0)
        for provider, times in found.items():
            recorder.add(*times["total"], **row, provider=provider, metric=metric, unit="ms")
            peak = metric.replace("_ms", "_peak_mib")
            recorder.add(*times["peak"], **row, provider=provider, metric=peak, unit="MiB")
        medians = [times["total"][0] for times in found.values()]
        print(f"{title}: {text} {' to '.join(f'{time:.1f}' for time in medians)} ms", flush=True)
