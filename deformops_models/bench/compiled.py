"""`bench --model --compile`: inference of whole detectors under `torch.compile`, patched against unpatched."""

import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from deformops_models.backend import call_counts
from deformops_models.bench import steps
from deformops_models.bench.record import Recorder

#: In this order: each of ours is held to the errors of upstream's before it.
PROVIDERS = ("upstream", "ours", "upstream_compiled", "ours_compiled")


def measure(
    name: str, title: str, bench: steps.Bench, recorder: Recorder, providers: Sequence[str], backend: str = "inductor"
) -> Iterator[str]:
    """Errors and times of inference, eager and compiled, and the seconds that the first compiled call takes.

    The gate: each output of ours may be twice as far from the unpatched float32 one as unpatched bf16's,
    and a rounding.

    Args:
        name: of the detector, for the rows.
        title: for what is printed.
        bench: the detector.
        recorder: takes the rows.
        providers: of `PROVIDERS`.
        backend: of torch.compile.

    Yields:
        What failed.
    """
    row = {"op": "inference", "preset": name, "distribution": "random", "dtype": bench.detector.dtype}
    bench.model.eval()
    exact = logits(bench.infer(half=False))
    allowed, passed, compiled = {}, [], {}
    for provider in PROVIDERS:
        whose, _, late = provider.partition("_")
        # The eager one is measured in any case: its errors are the bound where upstream's compiled one fails.
        if provider != "upstream" and not {provider, provider.replace("upstream", "ours")} & {*providers}:
            continue
        with bench.patched(whose):
            model = bench.model
            if late:
                # What was compiled for other classes of these modules counts towards Dynamo's limit.
                torch._dynamo.reset()
                model = torch.compile(model, backend=backend, dynamic=False)
            before, start = call_counts.copy(), time.perf_counter()
            try:
                found = logits(bench.infer(model))
            except torch._dynamo.exc.TorchDynamoException as error:
                if provider in providers:
                    yield f"{provider}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                continue
            seconds, counts = time.perf_counter() - start, call_counts - before
            errors = {key: ((found[key] - truth).norm() / truth.norm()).item() for key, truth in exact.items()}
            if whose == "upstream":
                allowed = {key: steps.twice(error) for key, error in errors.items()}
            if provider not in providers:
                continue
            for key, error in errors.items():
                recorder.add(error, **row, provider=provider, metric=f"error_{key}", unit="1")
            recorder.add(counts["msda_forward"], **row, provider=provider, metric="kernel_calls", unit="1")
            problem = bench.idle(whose, counts, ["msda_forward"]) or steps.too_far(errors, allowed)
            print(f"{title} {provider}: {steps.said(errors)}{f': {problem}' if problem else ''}", flush=True)
            if problem:
                yield f"{provider}: {problem}"
                continue
            passed.append(provider)
            if late:
                recorder.add(seconds, **row, provider=provider, metric="compile_s", unit="s")
                print(f"{title} {provider}: the first call took {seconds:.1f} s", flush=True)
                # These cannot take turns: each turn would compile again.
                compiled[provider] = steps.summarized(
                    bench.inferences(steps.WARM_UP, steps.ROUNDS * steps.INFERENCES, model)
                )
    torch._dynamo.reset()
    eager = [provider for provider in passed if provider not in compiled]
    steps.record_inference(
        bench.interleaved(eager, bench.inferences, steps.INFERENCES) | compiled, title, bench, recorder, row
    )


def logits(outputs: object) -> dict[str, Tensor]:
    """The outputs that are called logits, in float32, or the first tensor of outputs without names."""
    if isinstance(outputs, Mapping):
        found = {name: value for name, value in outputs.items() if "logits" in name and isinstance(value, Tensor)}
    else:
        while not isinstance(outputs, Tensor):
            outputs = outputs[0]
        found = {"logits": outputs}
    return {name: value.float().cpu() for name, value in found.items()}
