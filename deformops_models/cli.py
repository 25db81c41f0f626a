"""The command `deformops-models`."""

import argparse
import contextlib
import json
import os
import shlex
import sys
from typing import Any, NoReturn

from deformops_models import __version__
from deformops_models.console import DTYPES, UsageError, table


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _probability(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) <= 1:
            return value
    raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"unknown dtype {text!r}: use {', '.join(DTYPES)}")
    return DTYPES[text]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="deformops-models", description="Detectors with deformable attention on GPU kernels.")
    parser.add_argument("--version", action="version", version=f"deformops-models {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = commands.add_parser("doctor", help="what this machine has and what will run on it")
    command.add_argument(
        "--verify", action="store_true", help="check every dtype against float64; exit code 1 on a failure"
    )
    command.set_defaults(run=_doctor)

    command = commands.add_parser("checkpoints", help="list the published checkpoints")
    command.add_argument("--task", help="keep the tasks that contain this text, such as 'panoptic'")
    command.add_argument("--framework", help="keep this framework: transformers or mmdet")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_checkpoints)

    command = commands.add_parser("predict", help="run a checkpoint on images")
    command.add_argument("images", nargs="+", metavar="IMAGE", help="image files, or folders of images")
    command.add_argument(
        "--model", default="shapes-tiny", help="alias of a checkpoint, or a local model folder (default: %(default)s)"
    )
    command.add_argument("--out", required=True, metavar="DIR", help="folder for the overlay pictures and JSON files")
    command.add_argument("--threshold", type=_probability, default=0.5, help="lowest score to keep (default: 0.5)")
    command.add_argument("--task", choices=("instance", "panoptic", "semantic"), help="Mask2Former: instead of its own")
    command.add_argument(
        "--size",
        choices=("eval", "hub"),
        help="input size: of the published metric, or the repo's or folder's own (default: eval, own for a folder)",
    )
    command.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    command.add_argument("--dtype", type=_dtype, default="float32", help=f"{', '.join(DTYPES)} (default: float32)")
    command.add_argument("--json", action="store_true", help="also print all predictions to stdout as JSON")
    command.set_defaults(run=_predict)

    command = commands.add_parser("demo", help="small detectors on a photo, patched and unpatched; no network, no GPU")
    command.add_argument("--out", metavar="DIR", default="deformops-demo", help="for pictures (default: %(default)s)")
    command.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    command.set_defaults(run=_demo)

    command = commands.add_parser("bench", help="time the operators and whole detectors, on a GPU")
    what = command.add_mutually_exclusive_group()
    what.add_argument(
        "--preset",
        nargs="+",
        metavar="NAME",
        default=["all"],
        help="encoder, decoder, m2f1024, rtdetr640, narrow, five_levels, eight_points, unequal, host (default: all)",
    )
    what.add_argument(
        "--model",
        nargs="+",
        metavar="NAME",
        help="instead: training step and inference of whole detectors, patched and unpatched: mask2former_swin_b, "
        "mask2former_swin_t, deformable_detr_r50 (these three are all), mask2former_swin_t_512, "
        "deformable_detr_r50_b2, dino_r50",
    )
    what.add_argument(
        "--convergence", action="store_true", help="instead: 200 steps of training, patched and five times unpatched"
    )
    what.add_argument("--linear", action="store_true", help="instead: how cost grows with queries, points, channels")
    what.add_argument(
        "--family",
        nargs="+",
        metavar="NAME",
        help="instead: forward with backward pass and inference of a detector of every family, patched and unpatched; "
        "all, or names as rt_detr",
    )
    what.add_argument("--plot-only", metavar="CSV", help="instead: draw the pictures of an earlier run; needs no GPU")
    command.add_argument(
        "--compile",
        nargs="?",
        const="inference",
        choices=("inference", "training"),
        help="with --model: only inference, or only training steps, eager, compiled, and compiled as CUDA graphs",
    )
    command.add_argument("--dtype", nargs="+", metavar="NAME", default=[], help=f"{', '.join(DTYPES)}, autocast")
    command.add_argument("--distribution", nargs="+", metavar="NAME", default=[], help="of locations: local, uniform")
    command.add_argument("--op", nargs="+", metavar="NAME", default=[], help="msda, deformable_attention")
    command.add_argument(
        "--provider",
        nargs="+",
        metavar="NAME",
        default=[],
        help="ours, ours_deterministic, bare_launch, transformers, transformers_compiled, deformops, "
        "deformops_native, deformops_softmax, mmcv (default: what is installed); with --model: upstream, "
        "ours_attention, ours; with --compile: upstream, ours, upstream_compiled, ours_compiled, upstream_graphs, "
        "ours_graphs (as CUDA graphs); with --family: upstream, ours",
    )
    command.add_argument(
        "--out", metavar="DIR", default="deformops-bench", help="for results.csv and pictures (default: %(default)s)"
    )
    command.add_argument("--commit", help="recorded with each row (default: the checkout's HEAD, or the version)")
    command.set_defaults(run=_bench)
    _add_training(commands)
    return parser


def _add_training(commands: Any) -> None:
    command = commands.add_parser("shapes", help="write a synthetic COCO-format data set to try finetune and eval on")
    command.add_argument("--out", required=True, metavar="DIR", help="folder for images/ and annotations/")
    command.add_argument("--images", type=int, default=500, metavar="N", help="for training (default: %(default)s)")
    command.add_argument("--val", type=int, metavar="N", help="for validation (default: a fifth of --images)")
    command.add_argument("--size", type=int, default=128, metavar="PIXELS", help="longest edge (default: %(default)s)")
    command.add_argument("--seed", type=int, default=0, metavar="S", help="of everything random (default: %(default)s)")
    command.add_argument("--workers", type=int, metavar="N", help="processes that draw (default: one for each core)")
    command.set_defaults(run=_shapes)

    command = commands.add_parser(
        "finetune",
        help="train a Mask2Former or Deformable DETR of transformers on a COCO-format folder",
        description="On several GPUs: torchrun --nproc-per-node N -m deformops_models.cli finetune ..., or accelerate "
        "launch --multi_gpu -m.",
    )
    command.add_argument(
        "--model",
        required=True,
        help="alias of a checkpoint, model folder, folder with a config only, or shapes-tiny from scratch",
    )
    _add_data(command)
    command.add_argument("--out", required=True, metavar="DIR", help="folder for last/, best/, log.jsonl and curve.png")
    command.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint in --out, if there is one"
    )
    number = {"help": "default: %(default)s"}
    command.add_argument("--epochs", type=int, default=12, metavar="N", **number)
    command.add_argument("--batch-size", type=int, default=4, metavar="N", help="per process (default: %(default)s)")
    command.add_argument(
        "--accumulate", type=int, default=1, metavar="N", help="batches per step (default: %(default)s)"
    )
    command.add_argument("--image-size", type=int, default=512, metavar="PIXELS", help="square (default: %(default)s)")
    command.add_argument("--lr", type=float, default=1e-4, metavar="X", help="highest rate (default: %(default)s)")
    command.add_argument("--warmup", type=int, metavar="STEPS", help="default: a twentieth, at most 500; then a cosine")
    command.add_argument("--weight-decay", type=float, default=0.05, metavar="X", **number)
    command.add_argument(
        "--clip", type=float, default=1.0, metavar="NORM", help="of the gradient (default: %(default)s)"
    )
    command.add_argument(
        "--backbone-scale", type=float, metavar="X", help="of the backbone's rate (default: 0.1, from scratch 1)"
    )
    command.add_argument("--freeze-backbone", action="store_true", help="train everything but the backbone")
    command.add_argument(
        "--ema",
        type=float,
        nargs="?",
        const=0.999,
        metavar="DECAY",
        help="evaluate and save averaged weights (0.999; less in the first steps)",
    )
    command.add_argument("--no-augment", dest="augment", action="store_false", help="no mirroring, scaling, colours")
    precision = command.add_mutually_exclusive_group()
    precision.add_argument("--bf16", action="store_true", default=None, help="autocast (default where a GPU has it)")
    precision.add_argument("--fp32", action="store_false", dest="bf16", help="float32 throughout")
    command.add_argument("--fsdp", action="store_true", help="spread weights and optimizer over the processes (FSDP2)")
    command.add_argument(
        "--compile",
        nargs="?",
        const="default",
        choices=("default", "reduce-overhead"),
        help="torch.compile the layers of the model, not its loss; reduce-overhead also makes CUDA graphs of them",
    )
    command.add_argument("--gradient-checkpointing", action="store_true", help="less memory, more time")
    command.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="default: after each epoch only")
    command.add_argument("--seed", type=int, default=0, metavar="S", **number)
    command.add_argument("--device", help="cpu or cuda (default: cuda if there is one)")
    command.set_defaults(run=_finetune)

    command = commands.add_parser("eval", help="COCO average precision of a checkpoint on a COCO-format folder")
    command.add_argument("--model", required=True, help="alias of a checkpoint, local model folder, or shapes-tiny")
    _add_data(command)
    command.add_argument("--split", choices=("val", "train"), default="val", help="default: %(default)s")
    command.add_argument("--compare", action="store_true", help="evaluate the unpatched model too")
    command.add_argument("--limit", type=int, metavar="N", help="only the first N images")
    command.add_argument("--image-size", type=int, metavar="PIXELS", help="default: the published or saved input size")
    command.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    command.add_argument("--dtype", type=_dtype, default="float32", help=f"of autocast: {', '.join(DTYPES)}")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_eval)


def _add_data(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data",
        required=True,
        metavar="DIR",
        help="holds annotations/{train,val}.json and images/{train,val}/, or COCO's own folders, as train2017/",
    )
    command.add_argument("--skip-broken", action="store_true", help="leave out broken images and annotations")
    command.add_argument("--workers", type=int, default=2, metavar="N", help="processes that read images (default: 2)")


def _doctor(args: argparse.Namespace) -> int:
    from deformops_models import doctor

    print(doctor.describe())
    return doctor.verify() if args.verify else 0


def _checkpoints(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from deformops_models import hub

    everything = hub.checkpoints()
    frameworks = sorted({row.framework for row in everything})
    if args.framework and args.framework not in frameworks:
        raise UsageError(f"unknown framework {args.framework!r}: use {' or '.join(frameworks)}")
    rows = [
        row
        for row in everything
        if (not args.framework or row.framework == args.framework)
        and (not args.task or args.task.lower() in row.task.lower())
    ]
    if not rows:
        tasks = sorted({row.task for row in everything if args.framework in (None, row.framework)})
        of = f" of {args.framework}" if args.framework else ""
        raise UsageError(f"no checkpoint{of} has a task like {args.task!r}: use {', '.join(tasks)}")
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2, default=str))
        return 0
    cells = [("ALIAS", "FRAMEWORK", "TASK", "DATASET", "BACKBONE", "METRIC", "LICENCE")]
    for row in rows:
        metric = ", ".join(f"{name} {value}" for name, value in row.metrics.items())
        facts = (row.alias, row.framework, row.task, row.dataset, row.backbone, metric, row.license)
        cells.append(tuple(fact or "-" for fact in facts))
    print(table(cells))
    return 0


def _predict(args: argparse.Namespace) -> int:
    from deformops_models import predict

    return predict.run(args)


def _demo(args: argparse.Namespace) -> int:
    from deformops_models import demo

    return demo.run(args.out, args.device)


def _bench(args: argparse.Namespace) -> int:
    from deformops_models.bench import run

    return run.run(args)


def _shapes(args: argparse.Namespace) -> int:
    from deformops_models.train import shapes

    return shapes.run(args)


def _finetune(args: argparse.Namespace) -> int:
    from deformops_models.train import finetune

    return finetune.run(args)


def _eval(args: argparse.Namespace) -> int:
    from deformops_models.train import evaluate

    return evaluate.run(args)


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 a check failed, 2 bad input, 130 interrupted."""
    try:
        argv = sys.argv[1:] if argv is None else argv
        args = _parser().parse_args(argv)
        args.command_line = shlex.join(["deformops-models", *argv])
        code = args.run(args)
        sys.stdout.flush()
        return code
    except UsageError as error:
        rank = os.environ.get("RANK", "0")
        # In one piece: several processes may write at once.
        sys.stderr.write(f"deformops-models{f', rank {rank}' * (rank != '0')}: {' '.join(str(error).split())}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has gone; without this the interpreter complains once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
