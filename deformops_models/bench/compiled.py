"""`bench --model --compile`: inference or training of whole detectors under `torch.compile`, patched and unpatched."""

import contextlib
import functools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from deformops_models.backend import call_counts
from deformops_models.bench import steps
from deformops_models.bench.measure import Quantiles
from deformops_models.bench.record import Recorder
from deformops_models.train.tasks import REGION_VARIANTS, compile_regions

#: In this order: each of ours is held to the errors of upstream's before it, as far as they were asked for.
PROVIDERS = ("upstream", "ours", "upstream_compiled", "ours_compiled", "upstream_graphs", "ours_graphs")


def measure_inference(
    name: str, title: str, bench: steps.Bench, recorder: Recorder, providers: Sequence[str], backend: str = "inductor"
) -> Iterator[str]:
    """Errors and times of inference, eager and compiled, and the seconds that compiling takes.

    The gate: each output of ours may be twice as far from the unpatched float32 one as unpatched bf16's, and a
    rounding.

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

    def errors() -> dict[str, float]:
        found = logits(bench.infer())
        return {key: ((found[key] - truth).norm() / truth.norm()).item() for key, truth in exact.items()}

    check = functools.partial(_check, row, title, bench, recorder, providers, bench.infer, errors, ["msda_forward"])
    passed, compiled = yield from check(_compiling(_whole, bench.model, backend), bench.inferences, steps.INFERENCES)
    found = bench.interleaved(passed, bench.inferences, steps.INFERENCES)
    steps.record_inference(found | compiled, title, bench, recorder, row)


def measure_training(
    name: str, title: str, bench: steps.Bench, recorder: Recorder, providers: Sequence[str], backend: str = "inductor"
) -> Iterator[str]:
    """The same of training steps, with loss and gradient norm: regions of the network, as `finetune` compiles them."""
    network = getattr(bench.model, "model", None)
    if network is None:
        yield "it computes its loss inside its network: only inference can be compiled"
        return
    row = {"op": "train_step", "preset": name, "distribution": "random", "dtype": bench.detector.dtype}
    bench.model.train()
    exact = bench.exact()
    needed = ["msda_forward", "msda_backward"]
    once, errors = functools.partial(bench.values, seed=0), functools.partial(bench.errors, exact)
    check = functools.partial(_check, row, title, bench, recorder, providers, once, errors, needed)
    whole = functools.partial(bench.steps, parts=False)
    passed, compiled = yield from check(_compiling(compile_regions, network, backend), whole, steps.STEPS)
    found = bench.interleaved(passed, whole, steps.STEPS)
    steps.record_steps(found | compiled, title, bench, recorder, row)


def _check(
    row: Mapping[str, str],
    title: str,
    bench: steps.Bench,
    recorder: Recorder,
    providers: Sequence[str],
    once: Callable[[], object],
    errors: Callable[[], dict[str, float]],
    needed: Sequence[str],
    compiling: Callable[[str], contextlib.AbstractContextManager],
    clock: Callable[[int, int], list[steps.Sample]],
    calls: int,
) -> Generator[str, None, tuple[list[str], dict[str, dict[str, Quantiles]]]]:
    """Records the errors of all providers, and times the compiled ones: each turn of one would compile again.

    Yields:
        What failed.

    Returns:
        The eager providers that may be timed, and the compiled ones' times.
    """
    allowed, passed, compiled = {}, [], {}
    for provider in PROVIDERS:
        whose, _, late = provider.partition("_")
        # Upstream's eager one is measured in any case: its errors are the bound.
        if provider not in ("upstream", *providers):
            continue
        with bench.patched(whose), compiling(late) if late else contextlib.nullcontext():
            before, start = call_counts.copy(), time.perf_counter()
            try:
                once()
                seconds, counts = time.perf_counter() - start, call_counts - before
                found = errors()
            except torch._dynamo.exc.TorchDynamoException as error:
                if provider in providers:
                    yield f"{provider}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                continue
            bound = {key: steps.twice(error) for key, error in found.items()}
            allowed = allowed or bound
            problem = bench.idle(whose, counts, needed) or steps.too_far(found, allowed)
            if whose == "upstream" and not problem:
                allowed = {key: max(bound[key], allowed[key]) for key in bound}
            if provider not in providers:
                continue
            provided = {**row, "provider": provider}
            steps.record_errors(found, counts["msda_forward"], problem, title, recorder, provided)
            if problem:
                yield f"{provider}: {problem}"
            elif late:
                recorder.add(seconds, **row, provider=provider, metric="compile_s", unit="s")
                print(f"{title} {provider}: the first call took {seconds:.1f} s", flush=True)
                compiled[provider] = steps.summarized(clock(steps.WARM_UP, steps.ROUNDS * calls))
            else:
                passed.append(provider)
    return passed, compiled


def _whole(model: nn.Module, **options) -> list[nn.Module]:
    model.compile(**options)
    return [model]


def _compiling(
    compiler: Callable[..., list[nn.Module]], module: nn.Module, backend: str
) -> Callable[[str], contextlib.AbstractContextManager]:
    @contextlib.contextmanager
    def compiling(way: str) -> Iterator[None]:
        # What was compiled for other classes of these modules counts towards Dynamo's limit.
        torch._dynamo.reset()
        steps.forget()
        regions = compiler(module, backend=backend, dynamic=False)
        try:
            with (
                torch._dynamo.config.patch(recompile_limit=REGION_VARIANTS),
                torch._inductor.config.patch({"triton.cudagraphs": way == "graphs"}),  # mode="reduce-overhead"
            ):
                yield
        finally:
            for region in regions:
                region._compiled_call_impl = None
            torch._dynamo.reset()

    return compiling


def logits(outputs: object) -> dict[str, Tensor]:
    """The outputs that are called logits, in float32, or the first tensor of outputs without names."""
    if isinstance(outputs, Mapping):
        found = {name: value for name, value in outputs.items() if "logits" in name and isinstance(value, Tensor)}
    else:
        while not isinstance(outputs, Tensor):
            outputs = outputs[0]
        found = {"logits": outputs}
    return {name: value.float().cpu() for name, value in found.items()}
