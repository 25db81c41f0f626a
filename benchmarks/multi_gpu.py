"""Training steps of a whole detector on one GPU and on several: images/s, milliseconds, memory, as rows of results.csv.

Run from the checkout's root, once for each configuration; each takes about a minute:

    export PYTHONPATH=.
    torchrun --standalone --nproc-per-node 1 benchmarks/multi_gpu.py --out DIR
    torchrun --standalone --nproc-per-node 2 benchmarks/multi_gpu.py --out DIR
    torchrun --standalone --nproc-per-node 2 benchmarks/multi_gpu.py --out DIR --ddp
    torchrun --standalone --nproc-per-node 2 benchmarks/multi_gpu.py --out DIR --fsdp
    torchrun --standalone --nproc-per-node 1 benchmarks/multi_gpu.py --out DIR --compile
    torchrun --standalone --nproc-per-node 2 benchmarks/multi_gpu.py --out DIR --compile
    torchrun --standalone --nproc-per-node 1 benchmarks/multi_gpu.py --out DIR --compile reduce-overhead
    torchrun --standalone --nproc-per-node 2 benchmarks/multi_gpu.py --out DIR --compile reduce-overhead

The batch is that of one GPU, so that perfect scaling is as many times the images/s as there are GPUs.
"""

import argparse
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather
from torch.nn.parallel import DistributedDataParallel

from deformops_models.bench import models, record
from deformops_models.bench.measure import quantiles
from deformops_models.bench.steps import Timeline
from deformops_models.patching import patch
from deformops_models.train import sharding, tasks
from deformops_models.train.averaging import GradientAverage

WARM_UP, STEPS = 5, 30
#: Of sharing the work, other than `finetune`'s.
WAYS = {"ddp": "torch's DistributedDataParallel sums the gradients", "fsdp": "FSDP2, as `finetune --fsdp` does it"}
SUFFIXES = {"default": "_compiled", "reduce-overhead": "_graphs"}


def main(arguments: list[str] | None = None) -> None:
    """Times the steps and lets the main process append its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="for results.csv")
    presets = [name for name in models.MODELS if name.startswith("mask2former")]
    parser.add_argument("--preset", default="mask2former_swin_t", choices=presets, help="default: %(default)s")
    way = parser.add_mutually_exclusive_group()
    for name, what in WAYS.items():
        way.add_argument(f"--{name}", dest="way", action="store_const", const=name, help=what)
    parser.add_argument(
        "--compile",
        nargs="?",
        const="default",
        choices=list(SUFFIXES),
        help="torch.compile the network, as `finetune` does; reduce-overhead makes CUDA graphs of it",
    )
    parser.add_argument("--commit", help="recorded with each row (default: the checkout's HEAD)")
    args = parser.parse_args(arguments)
    if args.way == "fsdp" and args.compile:
        parser.error("--fsdp: it does not go with --compile")
    state = PartialState(cpu=not torch.cuda.is_available())
    if args.way and state.num_processes == 1:
        parser.error(f"--{args.way}: it needs several processes")

    torch.manual_seed(3)  # the same weights everywhere, as FSDP takes each process's own
    detector = models.MODELS[args.preset].build()
    models.wake_attention(detector.model)
    times, peak = measure(detector, state, args.way, args.compile)
    if state.is_main_process:
        images = len(detector.inputs["pixel_values"]) * state.num_processes
        kind = f"{args.way}_" if args.way else ""
        row = {"op": "train_step", "preset": args.preset, "distribution": "random", "dtype": "bfloat16"}
        row["provider"] = f"ours_{kind}{state.num_processes}gpu{SUFFIXES.get(args.compile, '')}"
        recorder = record.Recorder(args.out / "results.csv", record.machine(args.commit))
        step = quantiles(times)
        recorder.add(*step, **row, metric="step_ms", unit="ms")
        recorder.add(images / step[0] * 1e3, **row, metric="images_s", unit="1/s")
        recorder.add(peak, **row, metric="peak_mib", unit="MiB")
        for entry in recorder.rows:
            print(f"{entry['provider']}: {entry['metric']} {entry['median']:,.4g}", flush=True)
    state.destroy_process_group()


@torch._dynamo.config.patch(recompile_limit=tasks.REGION_VARIANTS)
def measure(
    detector: models.Detector, state: PartialState, way: str | None, compiled: str | None
) -> tuple[list[float], float]:
    """Milliseconds of each step in this process, and the most MiB that a GPU had allocated."""
    device, cuda = state.device, state.device.type == "cuda"
    model = patch(detector.model).to(device).train()
    task = tasks.TASKS["Mask2Former"]
    task.share_count(model)
    tasks.freeze_unread(model, task)
    if compiled:
        tasks.compile_regions(model.model, dynamic=False, mode=compiled)
    average = None
    if way == "fsdp":
        sharding.shard(model, device)
    elif way == "ddp":
        model = DistributedDataParallel(
            model, [device.index] if cuda else None, find_unused_parameters=True, gradient_as_bucket_view=True
        )
    elif state.num_processes > 1:
        average = GradientAverage(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=cuda)
    inputs, targets = models.on(device, detector.inputs), models.on(device, detector.targets)
    lines = []
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP and cuda:
            torch.cuda.synchronize()
            # What compiled CUDA graphs hold was allocated when they were recorded.
            if compiled != "reduce-overhead":
                torch.cuda.reset_peak_memory_stats()
        torch.compiler.cudagraph_mark_step_begin()
        lines.append(Timeline(device))
        with lines[-1].part("step"):
            with torch.autocast(device.type, torch.bfloat16):
                loss = detector.loss(model, inputs, targets)
            loss.backward()
            if average is not None:
                average()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    times = [line.times()["total"] for line in lines[WARM_UP:]]
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
    return times, gather(torch.tensor([peak], device=device)).max().item()


if __name__ == "__main__":
    sys.exit(main())
