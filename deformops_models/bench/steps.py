"""`bench --model`: training step and inference of whole detectors under bf16 autocast, patched against unpatched."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from torch import nn

from deformops_models.backend import call_counts
from deformops_models.bench.measure import Quantiles, quantiles
from deformops_models.bench.models import MODELS, Detector, on, wake_attention
from deformops_models.bench.record import Recorder
from deformops_models.console import missing
from deformops_models.patching import PARTS as PATCHED
from deformops_models.patching import patch, unpatch

#: What of a model is patched.
PROVIDERS = {"upstream": (), "ours_attention": ("attention",), "ours": PATCHED}
#: Of a training step, in the order in which they run; "decoder" is what of the forward pass is in no other part.
PARTS = ("backbone", "msda", "decoder", "matching", "loss", "backward", "optimizer")
_WARM_UP = 3
_STEPS = 10
_INFERENCES = 20
_SEEDS = range(7, 12)


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


def run(names: Sequence[str], providers: Sequence[str], recorder: Recorder, device: str = "cuda") -> list[str]:
    """Records errors, times and memory of each model and prints a line for each; returns what failed."""
    failures = []
    for number, name in enumerate(names, 1):
        title = f"[{number}/{len(names)}] {name}"
        if problem := missing("all", MODELS[name].packages):
            print(f"{title}: skipped: {problem}", flush=True)
            continue
        start = time.perf_counter()
        try:
            failures += _run_model(name, title, providers, recorder, torch.device(device))
        except torch.cuda.OutOfMemoryError as error:
            print(f"{title}: skipped: {str(error).partition('. ')[0]}", flush=True)
        print(f"{title}: {time.perf_counter() - start:.0f} s", flush=True)
        _forget()
    return failures


def _run_model(
    name: str, title: str, providers: Sequence[str], recorder: Recorder, device: torch.device
) -> Iterator[str]:
    """One model under all providers; yields what failed."""
    torch.manual_seed(3)
    detector = MODELS[name].build()
    wake_attention(detector.model)
    for module in detector.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    bench = _Bench(detector, device)
    row = {"preset": name, "distribution": "random", "dtype": "bfloat16"}
    print(f"{title}: {sum(p.numel() for p in detector.model.parameters()) / 1e6:.1f} M parameters", flush=True)
    passed = {}
    for provider, errors, kernels, problem in bench.check(providers):
        train = row | {"op": "train_step", "provider": provider}
        for quantity, error in errors.items():
            recorder.add(error, **train, metric=f"error_{quantity}", unit="1")
        recorder.add(kernels, **train, metric="kernel_calls", unit="1")
        said = ", ".join(f"{quantity} off by {error:.1e}" for quantity, error in errors.items())
        print(f"{title} {provider}: {said}{f': {problem}' if problem else ''}", flush=True)
        passed[provider] = problem is None
        if problem:
            yield f"{name} {provider}: {problem}"
    for provider in providers:
        if not passed[provider]:
            continue
        with bench.patched(provider):
            steps, peak = bench.steps()
            inference = bench.inference()
        train = row | {"op": "train_step", "provider": provider}
        recorder.add(*steps["total"], **train, metric="step_ms", unit="ms")
        for part in PARTS:
            recorder.add(*steps.get(part, (0.0,)), **train, metric=f"part_{part}_ms", unit="ms")
        recorder.add(peak, **train, metric="peak_mib", unit="MiB")
        recorder.add(bench.images / steps["total"][0] * 1e3, **train, metric="images_s", unit="1/s")
        infer = row | {"op": "inference", "provider": provider}
        recorder.add(*inference, **infer, metric="inference_ms", unit="ms")
        recorder.add(bench.images / inference[0] * 1e3, **infer, metric="images_s", unit="1/s")
        print(
            f"{title} {provider}: step {steps['total'][0]:.1f} ms, inference {inference[0]:.1f} ms, "
            f"peak {peak / 1024:.2f} GiB",
            flush=True,
        )
        _forget()


class _Bench:
    """A detector on a device, and what is measured of it."""

    def __init__(self, detector: Detector, device: torch.device) -> None:
        self.detector, self.device = detector, device
        self.model = detector.model.to(device)
        self.pixels, self.targets = detector.pixels.to(device), on(device, detector.targets)
        self.images = len(self.pixels)

    @contextlib.contextmanager
    def patched(self, provider: str) -> Iterator[None]:
        if PROVIDERS[provider]:
            patch(self.model, parts=PROVIDERS[provider])
        try:
            yield
        finally:
            unpatch(self.model)

    def check(self, providers: Sequence[str]) -> Iterator[tuple[str, dict[str, float], int, str | None]]:
        """The gate: median errors of loss and gradient norm over several seeds against the unpatched float32 step.

        A provider's may be twice what the unpatched bf16 step's are, and a rounding.

        Yields:
            Provider, errors by quantity, launches of the kernel per step, and what is wrong or None.
        """
        self.model.train()
        exact = [self._values(seed, half=False) for seed in _SEEDS]
        allowed = {}
        for provider in dict.fromkeys(("upstream", *providers)):
            before = call_counts.copy()
            with self.patched(provider):
                found = [self._values(seed, half=True) for seed in _SEEDS]
            counts = call_counts - before
            errors = {
                quantity: statistics.median(
                    abs(ours[quantity] / truth[quantity] - 1) for ours, truth in zip(found, exact, strict=True)
                )
                for quantity in ("loss", "grad_norm")
            }
            allowed = allowed or {q: 2 * (error + torch.finfo(torch.bfloat16).eps) for q, error in errors.items()}
            if provider not in providers:
                continue
            problem = "; ".join(
                f"{quantity} is off by {error:.1e}, {allowed[quantity]:.1e} is allowed"
                for quantity, error in errors.items()
                if not error <= allowed[quantity]
            )
            launches = counts["msda_forward"] // len(_SEEDS)
            if self.device.type == "cuda" and PROVIDERS[provider] and (not launches or counts["upstream_forward"]):
                problem = "its kernels did not run"
            yield provider, errors, launches, problem or None
        self.model.zero_grad(set_to_none=True)
        _forget()

    def _values(self, seed: int, half: bool) -> dict[str, float]:
        torch.manual_seed(seed)
        self.model.zero_grad(set_to_none=True)
        loss = self._loss(half)
        loss.backward()
        norms = [p.grad.float().norm() for p in self.model.parameters() if p.grad is not None]
        return {"loss": loss.item(), "grad_norm": torch.stack(norms).norm().item()}

    def _loss(self, half: bool = True) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            return self.detector.loss(self.model, self.pixels, self.targets)

    def steps(self) -> tuple[dict[str, Quantiles], float]:
        """Milliseconds of training steps by part, and the peak memory in MiB; weights are as before afterwards.

        Nothing waits for the device between steps, as in a real training.
        """
        self.model.train()
        before = {name: tensor.to("cpu", copy=True) for name, tensor in self.model.state_dict().items()}
        cuda = self.device.type == "cuda"
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=cuda)
        lines = []
        for step in range(_WARM_UP + _STEPS):
            if step == _WARM_UP and cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            lines.append(self._step(optimizer))
        times = [line.times() for line in lines[_WARM_UP:]]
        peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
        self.model.load_state_dict(before)
        return {part: quantiles([t.get(part, 0.0) for t in times]) for part in times[0]}, peak

    def _step(self, optimizer: torch.optim.Optimizer) -> Timeline:
        line = Timeline(self.device)
        with contextlib.ExitStack() as stack:
            for part, owner, attribute, function in self.detector.calls(self.model):
                timed = line.wrap(part, function)
                stack.enter_context(mock.patch.object(owner, attribute, timed, create=True))
            with line.part("decoder"):
                loss = self._loss()
        with line.part("backward"):
            loss.backward()
        with line.part("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return line

    def inference(self) -> Quantiles:
        """Milliseconds of one forward pass."""
        self.model.eval()
        lines = []
        with torch.no_grad():  # inference mode would leave tensors in upstream's caches that training cannot use
            for _ in range(_WARM_UP + _INFERENCES):
                line = Timeline(self.device)
                with line.part("forward"), torch.autocast(self.device.type, torch.bfloat16):
                    self.detector.infer(self.model, self.pixels, self.targets)
                lines.append(line)
        return quantiles([line.times()["total"] for line in lines[_WARM_UP:]])


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
