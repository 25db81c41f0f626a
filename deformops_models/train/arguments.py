"""What `finetune` asks of its arguments before anything is read, and the Accelerator that they describe."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

import torch

from deformops_models.console import UsageError

if TYPE_CHECKING:
    from accelerate import Accelerator


def check_numbers(args: argparse.Namespace) -> None:
    """Raises UsageError if a number is out of its range."""
    at_least_one = ("epochs", "batch_size", "accumulate")
    for name in (*at_least_one, "workers", "seed", "warmup", "save_every"):
        if (value := getattr(args, name)) is not None and value < (name in at_least_one):
            raise UsageError(f"--{name.replace('_', '-')} {value}: the least is {int(name in at_least_one)}")
    if args.seed >= 2**63:
        raise UsageError(f"--seed {args.seed}: the most is {2**63 - 1}")
    for name in ("lr", "clip"):
        if not getattr(args, name) > 0:  # nor NaN
            raise UsageError(f"--{name} {getattr(args, name)}: it has to be positive")
    for name in ("weight_decay", "backbone_scale"):
        if (value := getattr(args, name)) is not None and not value >= 0:
            raise UsageError(f"--{name.replace('_', '-')} {value}: the least is 0")
    for name in ("lr", "weight_decay", "backbone_scale"):
        if (value := getattr(args, name)) is not None and value > torch.finfo(torch.float32).max:
            raise UsageError(f"--{name.replace('_', '-')} {value}: float32 does not hold it")
    if args.ema is not None and not 0 < args.ema < 1:
        raise UsageError(f"--ema {args.ema}: it is a decay between 0 and 1, such as 0.999")
    if args.image_size < 32 or args.image_size % 32:
        raise UsageError(f"--image-size {args.image_size}: use a multiple of 32")


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    """Returns what the arguments ask for.

    Raises:
        UsageError: options do not go together, or with this machine, or with how accelerate is set.
    """
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    if args.device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device {args.device}: use cpu or cuda; CUDA_VISIBLE_DEVICES chooses among GPUs")
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1"):
        # transformers would then load weights in the main process only.
        raise UsageError("accelerate is set to FSDP: launch with --multi_gpu in its place, and give finetune --fsdp")
    if args.fsdp and args.compile:
        raise UsageError("--fsdp: it does not go with --compile; leave one of them out")
    cpu = args.device == "cpu" or not torch.cuda.is_available()
    if args.compile == "reduce-overhead":
        # A graph overwrites its gradients when it runs again, and torch adds to them silently in its own memory.
        if args.accumulate > 1:
            raise UsageError(
                f"--accumulate {args.accumulate}: the CUDA graphs of --compile reduce-overhead keep one batch's "
                "gradients; use --compile alone"
            )
        if args.gradient_checkpointing:
            raise UsageError(
                "--gradient-checkpointing: it does not go with --compile reduce-overhead; use --compile alone"
            )
        if cpu:
            raise UsageError("--compile reduce-overhead: CUDA graphs need a CUDA GPU; use --compile")
    if cpu and args.device == "cuda":
        raise UsageError("--device cuda: no CUDA GPU can be used here; leave --device out or use --device cpu")
    native = not cpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if args.bf16 and not native and not cpu:
        name = torch.cuda.get_device_name()
        raise UsageError(f"--bf16: {name} has no bfloat16 of its own, only an emulation that is slow; use --fp32")
    half = native if args.bf16 is None else args.bf16
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision="bf16" if half else "no",
        gradient_accumulation_steps=args.accumulate,
    )
    if accelerator.distributed_type not in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        raise UsageError(
            f"accelerate is set to {accelerator.distributed_type.value}: only its --multi_gpu is supported here, "
            "and finetune's own --fsdp on top of it"
        )
    return accelerator
