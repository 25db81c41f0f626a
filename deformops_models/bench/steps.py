"""`bench --model`: training step and inference of whole detectors under bf16 autocast, patched against unpatched."""

import contextlib
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from unittest import mock

import torch
from torch import Tensor, nn

from deformops_models.backend import call_counts
from deformops_models.bench.measure import Quantiles, quantiles
from deformops_models.bench.models import Workload, on, wake_attention
from deformops_models.bench.record import Recorder
from deformops_models.patching import PARTS as PATCHED
from deformops_models.patching import patch, unpatch

#: What of a model is patched.
PROVIDERS = {"upstream": (), "ours_attention": ("attention",), "ours": PATCHED}
#: Of a training step, in the order in which they run; "decoder" is what of the forward pass is in no other part.
PARTS = ("backbone", "msda", "decoder", "matching", "loss", "backward", "optimizer")
ROUNDS = 3
WARM_UP = 3  # calls before the first one that is timed
STEPS = 5  # of a round, as are inferences
INFERENCES = 7
_SEEDS = range(7, 12)

#: Milliseconds by part, of everything as "total", and the peak memory in MiB as "peak".
Sample = dict[str, float]


class Timeline:
    """The device's time, or the host's without a GPU, each moment counted for the innermost part that runs."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.running: list[str] = []
        self.marks: list[tuple[str, torch.cuda.Event | float]] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.running.append(name)
        self._mark()
        try:
            yield
        finally:
            self.running.pop()
            self._mark()

    def wrap(self, name: str, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            with self.part(name):
                return function(*args, **kwargs)

        return timed

    def _mark(self) -> None:
        if self.cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self.marks.append((self.running[-1] if self.running else "", now))

    def times(self) -> dict[str, float]:
        """Milliseconds by part, and of everything as "total"; waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        found = {"total": self._elapsed(self.marks[0][1], self.marks[-1][1])}
        for (name, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            if name:
                found[name] = found.get(name, 0) + self._elapsed(start, end)
        return found

    def _elapsed(self, start, end) -> float:
        return start.elapsed_time(end) if self.cuda else (end - start) * 1e3


#: Measures the bench of a name under providers into a recorder, with a title for what it prints; yields what failed.
Measure = Callable[[str, str, "Bench", Recorder, Sequence[str]], Iterator[str]]


def run(
    workloads: Mapping[str, Workload],
    measure: Measure,
    recorder: Recorder,
    providers: Sequence[str],
    device: str = "cuda",
) -> list[str]:
    """Builds and measures detectors one after the other; returns what failed."""
    failures = []
    for number, (name, workload) in enumerate(workloads.items(), 1):
        title = f"[{number}/{len(workloads)}] {name}"
        start = time.perf_counter()
        try:
            bench = Bench(workload, torch.device(device))
            count = sum(p.numel() for p in bench.model.parameters())
            print(f"{title}: {count / 1e6:.1f} M parameters", flush=True)
            for failure in measure(name, title, bench, recorder, providers):
                failures.append(f"{name} {failure}")
        except torch.cuda.OutOfMemoryError as error:
            print(f"{title}: skipped: {str(error).partition('. ')[0]}", flush=True)
        # Upstream's code can raise anything; the other detectors are timed all the same.
        except Exception as error:
            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        print(f"{title}: {time.perf_counter() - start:.0f} s", flush=True)
        bench = None
        forget()
    return failures


def measure(name: str, title: str, bench: "Bench", recorder: Recorder, providers: Sequence[str]) -> Iterator[str]:
    """Errors, times and memory of training steps and inference."""
    row = {"preset": name, "distribution": "random", "dtype": bench.detector.dtype}
    passed = []
    for provider, errors, kernels, problem in bench.check(providers):
        record_errors(errors, kernels, problem, title, recorder, row | {"op": "train_step", "provider": provider})
        if problem:
            yield f"{provider}: {problem}"
        else:
            passed.append(provider)
    found = bench.interleaved(passed, bench.steps, STEPS)
    record_steps(found, title, bench, recorder, row | {"op": "train_step"}, PARTS)
    inference = bench.interleaved(passed, bench.inferences, INFERENCES)
    record_inference(inference, title, bench, recorder, row | {"op": "inference"})


def record_errors(
    errors: Mapping[str, float], kernels: int, problem: str | None, title: str, recorder: Recorder, row: dict[str, str]
) -> None:
    """Records and prints the errors of the row's provider, and the launches of the forward kernel."""
    for quantity, error in errors.items():
        recorder.add(error, **row, metric=f"error_{quantity}", unit="1")
    recorder.add(kernels, **row, metric="kernel_calls", unit="1")
    said = ", ".join(f"{quantity} off by {error:.1e}" for quantity, error in errors.items())
    print(f"{title} {row['provider']}: {said}{f': {problem}' if problem else ''}", flush=True)


def record_steps(
    found: Mapping[str, Mapping[str, Quantiles]],
    title: str,
    bench: "Bench",
    recorder: Recorder,
    row: dict[str, str],
    parts: Sequence[str] = (),
) -> None:
    """Records and prints the times of each provider."""
    for provider, times in found.items():
        recorder.add(*times["total"], **row, provider=provider, metric="step_ms", unit="ms")
        for part in parts:
            recorder.add(*times.get(part, (0.0,)), **row, provider=provider, metric=f"part_{part}_ms", unit="ms")
        recorder.add(*times["peak"], **row, provider=provider, metric="peak_mib", unit="MiB")
        images = bench.images / times["total"][0] * 1e3
        recorder.add(images, **row, provider=provider, metric="images_s", unit="1/s")
        text = f"step {times['total'][0]:.1f} ms, peak {times['peak'][0] / 1024:.2f} GiB"
        print(f"{title} {provider}: {text}", flush=True)


def record_inference(
    found: Mapping[str, Mapping[str, Quantiles]], title: str, bench: "Bench", recorder: Recorder, row: dict[str, str]
) -> None:
    """Records and prints the times of each provider."""
    for provider, times in found.items():
        recorder.add(*times["total"], **row, provider=provider, metric="inference_ms", unit="ms")
        images = bench.images / times["total"][0] * 1e3
        recorder.add(images, **row, provider=provider, metric="images_s", unit="1/s")
        print(f"{title} {provider}: inference {times['total'][0]:.1f} ms", flush=True)


class Bench:
    """A detector on a device without dropout, and what is measured of it."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        torch.manual_seed(3)
        self.detector, self.device = workload.build(), device
        wake_attention(self.detector.model)
        self.model = self.detector.model.to(device)
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.inputs, self.targets = on(device, self.detector.inputs), on(device, self.detector.targets)
        self.images = len(next(iter(self.inputs.values())))

    @contextlib.contextmanager
    def patched(self, provider: str) -> Iterator[None]:
        if PROVIDERS[provider]:
            patch(self.model, parts=PROVIDERS[provider])
        try:
            yield
        finally:
            unpatch(self.model)

    def autocast(self, half: bool = True) -> torch.autocast:
        half = half and self.detector.dtype == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half)

    def check(self, providers: Sequence[str]) -> Iterator[tuple[str, dict[str, float], int, str | None]]:
        """The gate: median errors of loss and gradient norm over several seeds against the unpatched float32 step.

        A provider's may be twice what the unpatched bf16 step's are, and a rounding.

        Yields:
            Provider, errors by quantity, launches of the kernel per step, and what is wrong or None.
        """
        self.model.train()
        exact = self.exact()
        allowed = {}
        for provider in dict.fromkeys(("upstream", *providers)):
            before = call_counts.copy()
            with self.patched(provider):
                errors = self.errors(exact)
            counts = call_counts - before
            allowed = allowed or {q: twice(error) for q, error in errors.items()}
            if provider not in providers:
                continue
            problem = self.idle(provider, counts) or too_far(errors, allowed)
            yield provider, errors, counts["msda_forward"] // len(_SEEDS), problem
        self.model.zero_grad(set_to_none=True)
        forget()

    def exact(self) -> list[dict[str, float]]:
        """Loss and gradient norm of the float32 step from each seed."""
        return [self.values(seed, half=False) for seed in _SEEDS]

    def errors(self, exact: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Median relative errors of loss and gradient norm."""
        found = [self.values(seed) for seed in _SEEDS]
        return {
            quantity: statistics.median(
                abs(ours[quantity] / truth[quantity] - 1) for ours, truth in zip(found, exact, strict=True)
            )
            for quantity in ("loss", "grad_norm")
        }

    def idle(
        self, provider: str, counts: Mapping[str, int], needed: Sequence[str] = ("msda_forward", "msda_backward")
    ) -> str | None:
        """Says so if patched modules did not run the kernels that are needed, going by what was counted."""
        if self.device.type != "cuda" or not PROVIDERS[provider]:
            return None
        ran = all(counts[kernel] for kernel in needed) and not counts["upstream_forward"]
        return None if ran else "its kernels did not run"

    def values(self, seed: int, half: bool = True) -> dict[str, float]:
        """Loss and norm of the gradient of a step from a seed."""
        torch.manual_seed(seed)
        self.model.zero_grad(set_to_none=True)
        loss = self.loss(half)
        loss.backward()
        norms = [p.grad.float().norm() for p in self.model.parameters() if p.grad is not None]
        return {"loss": loss.item(), "grad_norm": torch.stack(norms).norm().item()}

    def loss(self, half: bool = True) -> Tensor:
        if _as_graphs():
            torch.compiler.cudagraph_mark_step_begin()
        with self.autocast(half):
            return self.detector.loss(self.model, self.inputs, self.targets)

    def infer(self, half: bool = True) -> object:
        """The outputs."""
        if _as_graphs():
            torch.compiler.cudagraph_mark_step_begin()
        # Inference mode would leave tensors in upstream's caches that training cannot use.
        with torch.no_grad(), self.autocast(half):
            return self.detector.infer(self.model, self.inputs)

    def interleaved(
        self,
        providers: Sequence[str],
        measure: Callable[[int, int], list[Sample]],
        calls: int,
        rounds: int = ROUNDS,
        settle: int = 1,
    ) -> dict[str, dict[str, Quantiles]]:
        """Quantiles by provider and part. All take turns, as the speed of a host drifts within minutes.

        Args:
            providers: of `PROVIDERS`.
            measure: gives samples, for the number of calls before the first one that is timed, and of those timed.
            calls: timed in each round.
            rounds: of turns.
            settle: calls before the first one that is timed, in every round but the first.
        """
        found = {provider: [] for provider in providers}
        for number in range(rounds):
            for provider, samples in found.items():
                with self.patched(provider):
                    samples += measure(settle if number else WARM_UP, calls)
        return {provider: summarized(samples) for provider, samples in found.items()}

    def steps(self, warm_up: int, calls: int, parts: bool = True) -> list[Sample]:
        """Training steps with AdamW, by parts if asked for; weights are as before afterwards."""
        before = {name: tensor.to("cpu", copy=True) for name, tensor in self.model.state_dict().items()}
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=self.device.type == "cuda")
        samples = self.losses(warm_up, calls, optimizer, parts)
        self.model.load_state_dict(before)
        return samples

    def losses(
        self, warm_up: int, calls: int, optimizer: torch.optim.Optimizer | None = None, parts: bool = True
    ) -> list[Sample]:
        """Forward and backward passes, and steps of the optimizer if there is one."""
        self.model.train()
        samples = self.clock(lambda: self.step(optimizer, parts), warm_up, calls)
        self.model.zero_grad(set_to_none=True)
        return samples

    def step(self, optimizer: torch.optim.Optimizer | None = None, parts: bool = True) -> Timeline:
        # Every step draws the same numbers.
        torch.manual_seed(7)
        self.model.zero_grad(set_to_none=True)
        line = Timeline(self.device)
        with contextlib.ExitStack() as stack:
            for part, owner, attribute, function in self.detector.calls(self.model) if parts else ():
                timed = line.wrap(part, function)
                stack.enter_context(mock.patch.object(owner, attribute, timed, create=True))
            with line.part("decoder"):
                loss = self.loss()
        with line.part("backward"):
            loss.backward()
        if optimizer is not None:
            with line.part("optimizer"):
                optimizer.step()
        return line

    def inferences(self, warm_up: int, calls: int) -> list[Sample]:
        """Forward passes."""
        self.model.eval()

        def call() -> Timeline:
            torch.manual_seed(7)
            line = Timeline(self.device)
            with line.part("forward"):
                self.infer()
            return line

        return self.clock(call, warm_up, calls)

    def clock(self, call: Callable[[], Timeline], warm_up: int, calls: int) -> list[Sample]:
        """Calls one after the other; nothing waits for the device between them, as in a real training."""
        cuda = self.device.type == "cuda"
        for _ in range(warm_up):
            call()
        if cuda:
            torch.cuda.synchronize()
            # What CUDA graphs hold was allocated when they were recorded, which belongs to their peak.
            if not _as_graphs():
                torch.cuda.reset_peak_memory_stats()
        lines = [call() for _ in range(calls)]
        times = [line.times() for line in lines]
        peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
        return [sample | {"peak": peak} for sample in times]


def _as_graphs() -> bool:
    """Whether what is compiled becomes CUDA graphs."""
    return torch._inductor.config.triton.cudagraphs


def summarized(samples: Sequence[Sample]) -> dict[str, Quantiles]:
    """Quantiles by part; a part that does not run in a step takes no time in it."""
    return {part: quantiles([sample.get(part, 0.0) for sample in samples]) for part in samples[0]}


def twice(error: float) -> float:
    """The error that ours may have where upstream's is `error`: twice as much, and a rounding."""
    return 2 * (error + torch.finfo(torch.bfloat16).eps)


def too_far(errors: Mapping[str, float], allowed: Mapping[str, float]) -> str | None:
    """Names the errors that are larger than allowed; NaN is."""
    return (
        "; ".join(
            f"{quantity} is off by {error:.1e}, {allowed[quantity]:.1e} is allowed"
            for quantity, error in errors.items()
            if not error <= allowed[quantity]
        )
        or None
    )


def forget() -> None:
    """Frees what nothing refers to, and lets the peak of memory begin anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
