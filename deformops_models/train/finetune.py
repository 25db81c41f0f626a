"""`deformops-models finetune`: training on a COCO-format folder with Accelerate.

Every random number of a step follows from the seed, the step and the process, and every image's augmentation from the
seed, the epoch and the image. So a training that goes on from a checkpoint needs no state of any generator, and does
what the uninterrupted one would have done. Which images a step has does not depend on how many processes share it, so
another number of processes may go on too; what dropout and sampled points draw is then new.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from deformops_models.console import UsageError, clear_left_overs, output_folder, require
from deformops_models.patching import report
from deformops_models.predict import quiet_transformers
from deformops_models.train import averaging, checkpoint, sharding
from deformops_models.train.arguments import check_numbers, make_accelerator
from deformops_models.train.card import model_card
from deformops_models.train.coco import SMALLEST, Batches, Split, TrainingImages, count_problems, mix, read_split
from deformops_models.train.evaluate import average_precision, detect
from deformops_models.train.history import History
from deformops_models.train.tasks import (
    REGION_VARIANTS,
    Task,
    check_keeps_layers,
    checkpoint_activations,
    compile_regions,
    find_task,
    freeze_unread,
    has_weights,
    load_model,
    load_processor,
    normalization,
    parameter_groups,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

#: Files of a training, below --out.
_LOG, _CURVE = "log.jsonl", "curve.png"
#: Arguments on which the losses depend: a training goes on with the same.
_SAME = (
    "model", "epochs", "lr", "weight_decay", "warmup", "clip", "backbone_scale", "image_size", "augment",
    "freeze_backbone", "ema", "seed",
)  # fmt: skip
#: The same of what is no argument, and what it is called.
_SAME_TOO = {
    "data": "--data",
    "val": "--data",
    "images_per_step": "--batch-size x --accumulate x number of processes",
    "precision": "precision",
}


def run(args: argparse.Namespace) -> int:
    """Trains; see `cli` for the arguments.

    Raises:
        UsageError: something was wrong before the first step, or stopped the training; the message says which.
    """
    require("finetune", "transformers", "torchvision", "accelerate", "pycocotools", "matplotlib", "tqdm")
    check_numbers(args)
    task = find_task(args.model)
    accelerator = make_accelerator(args)
    out = output_folder(args.out)
    with quiet_transformers():
        try:
            with checkpoint.claimed(out) if accelerator.is_main_process else nullcontext():
                _Training(args, task, accelerator, out).run()
        except OSError as error:  # a full disk, most often
            raise UsageError(f"--out {args.out}: stopped by {error}; mend that and go on with --resume") from error
    # A sharded model goes before the process group: the last to hold that waits for its threads, and the model would
    # wait with Python locked, which they need.
    accelerator.free_memory()
    accelerator.end_training()
    return 0


class _Training:
    """One training, from the check of the data to the last checkpoint."""

    def __init__(self, args: argparse.Namespace, task: Task, accelerator: Accelerator, out: Path) -> None:
        self.args, self.task, self.accelerator = args, task, accelerator
        self.sharded = args.fsdp and accelerator.num_processes > 1
        self.out = out
        self.last, self.best = self.out / "last", self.out / "best"
        self.noted: set[str] = set()
        state = self._last_state()
        self.train, self.val = (self._read(split) for split in ("train", "val"))
        if self.train.categories != self.val.categories:
            raise UsageError(f"{self.train.file} and {self.val.file} have different categories; give both the same")
        micro_batch = args.batch_size * accelerator.num_processes
        self.steps_per_epoch = -(-len(self.train.images) // (micro_batch * args.accumulate))
        self.steps = args.epochs * self.steps_per_epoch
        if args.warmup is not None and args.warmup > self.steps:
            raise UsageError(f"--warmup {args.warmup}: the whole training has {self.steps} steps")
        self.images_per_step = micro_batch * args.accumulate
        self._restore_or_begin(state)

    def _read(self, name: str) -> Split:
        args = self.args
        scale = SMALLEST if name == "train" and args.augment else 1
        edge = int(scale * args.image_size)
        split = read_split(args.data, name, masks=self.task.masks, skip_broken=args.skip_broken, least_edge=edge)
        record = self._skipped_file(name)
        goes_on = args.resume and self.last.exists() and record.is_file()
        before = record.read_text(encoding="utf-8").splitlines() if goes_on else []
        self.noted.update(before)
        if not before and self.accelerator.is_main_process:
            record.unlink(missing_ok=True)
        if split.problems and self.accelerator.is_main_process:
            listed = dict.fromkeys([*map(str, split.problems), *before])
            record.write_text("".join(f"{problem}\n" for problem in listed), encoding="utf-8")
            self._say(f"left out of {name}: {count_problems(split.problems)}; listed in {record}")
        if split.turned and self.accelerator.is_main_process:
            self._say(f"images of {name} turned as their EXIF orientation says: {split.turned}")
        return split

    def _skipped_file(self, split: str) -> Path:
        return self.out / f"skipped-{split}.txt"

    def _note_skipped(self, split: str, problems: Iterable[str]) -> None:
        """Lists what turned out to be broken only when it was read, each once for each process that met it."""
        for problem in problems:
            if problem not in self.noted:
                self.noted.add(problem)
                self._say(f"left out of {split}: {problem}")
                with self._skipped_file(split).open("a", encoding="utf-8") as file:
                    file.write(f"{problem}\n")

    def _last_state(self) -> dict[str, Any] | None:
        """Reads the last checkpoint, if there is one; refuses before any file is changed."""
        args = self.args
        if self.accelerator.is_main_process:
            checkpoint.recover(self.best)
            checkpoint.recover(self.last)
            clear_left_overs(self.out / _LOG)
            clear_left_overs(self.out / _CURVE)
        self.accelerator.wait_for_everyone()
        state = checkpoint.load_state(self.last)
        if state and not args.resume:
            raise UsageError(f"--out {args.out}: it holds a training at step {state['step']}; add --resume to go on")
        if not state and self.best.exists():
            gone = "there is no last/ to go on from, and " if args.resume else ""
            raise UsageError(f"--out {args.out}: {gone}a new training would replace its best/; choose another --out")
        if state and not (has_weights(str(self.last)) and (self.last / "preprocessor_config.json").is_file()):
            raise UsageError(f"{self.last}: its weights or preprocessor_config.json are gone; start in another --out")
        return state

    def _restore_or_begin(self, state: Mapping[str, Any] | None) -> None:
        """Builds model, optimizer and schedule, anew or as the last checkpoint has them."""
        from accelerate.utils import broadcast_object_list

        args, main = self.args, self.accelerator.is_main_process
        torch.manual_seed(args.seed)
        source = str(self.last) if state else args.model
        scratch = not has_weights(args.model)
        if args.backbone_scale is None:
            args.backbone_scale = 1.0 if scratch else 0.1
        self._check_same(state)
        model = load_model(self.task, source, self.train.id2label, say=self._say if main else lambda _: None)
        if left := report(model).skipped:
            raise UsageError(f"--model {args.model}: this version of transformers is not one known here: {left[0]}")
        # Two of each while one replaces the other: weights, averaged ones and Adam's moments in `last`; `best`.
        checkpoint.check_space(self.out, model, copies=2 * (4 + 1))
        self.processor = load_processor(self.task, source, args.image_size)
        self.ema = None
        if args.ema:
            self.ema = AveragedModel(model, multi_avg_fn=self._decayed)
            self.ema.requires_grad_(False)
            if not self.sharded:
                self.ema.to(self.accelerator.device)
            self.ema.n_averaged.fill_(state["step"] if state else 0)
        self._prepare(model, state)
        self.step, self.best_score = (state["step"], state["best"]) if state else (0, -1.0)
        scores: Mapping[int, float | None] = {}
        if main:
            self.history = History(self.out / _LOG, self.step)
            scores = self.history.scores()
            if scores:  # a training that was killed may have left an older picture
                self.history.draw(self.out / _CURVE)
        [scores] = broadcast_object_list([scores])
        # The epoch that the checkpoint ends may have been measured after it was written, or not yet.
        self.measured = max(scores, default=0)
        self.best_score = max([self.best_score, *(score for score in scores.values() if score is not None)])
        if main:
            verb = f"goes on at step {self.step} of" if state else "starts:"
            self._say(
                f"{args.model} {verb} {self.steps} steps of {self.images_per_step} images, {args.epochs} epochs of "
                f"{len(self.train.images)} images, {self.accelerator.num_processes} process(es)"
                f"{' with FSDP' if self.sharded else ', which --fsdp does not change' if args.fsdp else ''}, "
                f"{self.accelerator.mixed_precision.replace('no', 'fp32')} on {self.accelerator.device}"
            )

    def _check_same(self, state: Mapping[str, Any] | None) -> None:
        self.settings = {name: getattr(self.args, name) for name in _SAME}
        self.settings |= {
            "data": f"with the training set {self.train.digest} of {len(self.train.images)} images",
            "val": f"with the validation set {self.val.source}",
            "images_per_step": self.images_per_step,
            "precision": self.accelerator.mixed_precision.replace("no", "fp32"),
        }
        before_all = state["settings"] if state else {}
        for name, now in self.settings.items():
            if now == (before := before_all.get(name, now)):
                continue
            option = _SAME_TOO.get(name, f"--{name.replace('_', '-')}")
            if name == "augment":
                option, now, before = "--no-augment", not now, not before
            if isinstance(now, bool):
                text = f"{'' if now else 'without '}{option}: the training in {self.args.out} was begun "
                text += f"{'without' if now else 'with'} it"
            else:
                text = f"{option} {now}: the training in {self.args.out} had {before}"
            raise UsageError(f"{text}; go on with that, or choose another --out")

    def _prepare(self, model: nn.Module, state: Mapping[str, Any] | None) -> None:
        from transformers import get_cosine_schedule_with_warmup

        args = self.args
        if state and "weights" in state:
            model.load_state_dict(state["weights"])
        self.frozen = model.get_submodule(self.task.backbone.rstrip(".")) if args.freeze_backbone else None
        if self.frozen is not None:
            self.frozen.requires_grad_(False)
        if args.gradient_checkpointing:
            checkpoint_activations(model)
        if args.compile == "reduce-overhead":
            # Every set of layers would be recorded as graphs of its own.
            check_keeps_layers(model, f"--compile {args.compile}")
        if args.compile:
            compile_regions(model.model, dynamic=False, mode=args.compile)
        self.task.share_count(model)
        if self.sharded:
            sharding.shard(model, self.accelerator.device)
            if self.ema is not None:
                sharding.shard(self.ema.module, self.accelerator.device)
        else:
            model.to(self.accelerator.device)
        groups = parameter_groups(model, self.task, args.lr, args.weight_decay, args.backbone_scale)
        optimizer = torch.optim.AdamW(groups, fused=self.accelerator.device.type == "cuda")
        freeze_unread(model, self.task)
        self.model = model
        copied = self.accelerator.num_processes > 1 and not self.sharded
        self.average_gradients = averaging.GradientAverage(model) if copied else None
        self.optimizer = self.accelerator.prepare(optimizer)
        warmup = min(500, self.steps // 20) if args.warmup is None else args.warmup
        self.schedule = get_cosine_schedule_with_warmup(optimizer, warmup, self.steps)
        if state:
            self.optimizer.load_state_dict(sharding.parts_of(state["optimizer"], optimizer))
            self.schedule.load_state_dict(state["schedule"])

    def run(self) -> None:
        """Trains to the end."""
        from tqdm import tqdm

        args, main = self.args, self.accelerator.is_main_process
        batches = self._batches()
        bar = tqdm(initial=self.step, total=self.steps, unit="step", disable=None if main else True)
        with bar, _compiling() if args.compile else nullcontext():
            while True:
                if self.step > self.measured and self.step % self.steps_per_epoch == 0:
                    self._end_epoch()
                if self.step == self.steps:
                    break
                start = time.perf_counter()
                row = self._step(batches)
                self.step += 1
                if main:
                    speed, memory = self.images_per_step / (time.perf_counter() - start), _memory_gib()
                    epoch = (self.step - 1) // self.steps_per_epoch + 1
                    self.history.add(
                        step=self.step, epoch=epoch, **row, images_per_s=round(speed, 2), memory_gib=round(memory, 3)
                    )
                    bar.set_postfix_str(f"loss {row['loss']:.3f}, {speed:.1f} images/s, {memory:.2f} GiB")
                bar.update()
                # Before the epoch is measured: what it has learnt is kept, whatever that meets.
                if self.step % self.steps_per_epoch == 0 or (args.save_every and self.step % args.save_every == 0):
                    self._save_last()
        if main:
            best = f", the best AP is {self.best_score:.2f}, in {self.best}" if self.best.exists() else ""
            self._say(f"done: step {self.step} is in {self.last}{best}")
        # A process that ends much earlier than the first one can abort in torch's own threads.
        self.accelerator.wait_for_everyone()

    def _batches(self) -> Iterator[dict[str, Any]]:
        """All batches from this step on, through every epoch: the workers need not start again."""
        args, accelerator = self.args, self.accelerator
        mean, std = normalization(self.processor)
        images = TrainingImages(
            self.train,
            masks=self.task.masks,
            size=args.image_size,
            augment=args.augment,
            mean=mean,
            std=std,
            seed=args.seed,
            skip_broken=args.skip_broken,
        )
        batches = Batches(
            len(images),
            args.batch_size,
            per_epoch=self.steps_per_epoch * args.accumulate,
            start=self.step * args.accumulate,
            stop=self.steps * args.accumulate,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            seed=args.seed,
        )
        cuda = accelerator.device.type == "cuda"
        return iter(
            DataLoader(
                images, batch_sampler=batches, num_workers=args.workers, collate_fn=self._collate, pin_memory=cuda
            )
        )

    def _collate(self, samples: Sequence[dict[str, Any] | UsageError]) -> dict[str, Any]:
        for sample in samples:
            if isinstance(sample, UsageError):
                return {"error": str(sample)}
        names = [name for name in samples[0] if name not in ("image", "path", "skipped")]
        return {
            "paths": [sample["path"] for sample in samples],
            "skipped": [problem for sample in samples for problem in sample["skipped"]],
            "pixels": torch.stack([sample["image"] for sample in samples]),
            # All images' objects in one tensor: each that comes from a worker costs the training process time.
            "counts": [len(sample["labels"]) for sample in samples],
            "objects": {name: torch.cat([sample[name] for sample in samples]) for name in names},
        }

    def _inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The model's inputs out of a batch, on the device."""
        from accelerate.utils import send_to_device

        pixels, objects = send_to_device(
            (batch["pixels"], batch["objects"]), self.accelerator.device, non_blocking=True
        )
        return {
            "pixel_values": pixels,
            # The padding is part of the square: the processor's inputs have none, in one image at a time.
            "pixel_mask": torch.ones(len(pixels), *pixels.shape[-2:], dtype=torch.int64, device=pixels.device),
            **self.task.targets(objects, batch["counts"], self.args.image_size),
        }

    def _step(self, batches: Iterator[dict[str, Any]]) -> dict[str, float]:
        """One optimizer step; returns its loss, averaged over all processes, its highest rate and gradient norm."""
        accelerator = self.accelerator
        torch.manual_seed(mix(self.args.seed, self.step, accelerator.process_index))
        self.model.train()
        if self.frozen is not None:
            self.frozen.eval()
        if self.args.compile == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        total = torch.zeros((), device=accelerator.device)
        paths: list[str] = []
        for _ in range(self.args.accumulate):
            batch = next(batches)
            if "error" in batch:
                raise UsageError(f"{batch['error']}; mend it, or leave it out with --resume --skip-broken")
            self._note_skipped("train", batch["skipped"])
            paths += batch["paths"]
            inputs = self._inputs(batch)
            with accelerator.accumulate(), self._named(paths):
                with accelerator.autocast():
                    loss = self.model(**inputs).loss
                accelerator.backward(loss)
                total += loss.detach()
                if accelerator.sync_gradients:
                    if self.average_gradients is not None:
                        self.average_gradients()
                    mean, norm = self._mean_and_norm(total)
                self.optimizer.step()
                self.optimizer.zero_grad()
        rate = max(self.schedule.get_last_lr())
        self.schedule.step()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        return {"loss": mean, "lr": rate, "grad_norm": norm}

    def _decayed(self, averaged: list[Tensor], current: list[Tensor], updates: Tensor) -> None:
        """An exponential average whose decay rises to --ema: else it would hold on to a short training's start."""
        decay = min(self.args.ema, (1 + self.step) / (10 + self.step))
        get_ema_multi_avg_fn(decay)(averaged, current, updates)

    def _mean_and_norm(self, total: Tensor) -> tuple[float, float]:
        """Clips the gradients; returns the loss, averaged over all processes, and what the gradients' norm was.

        Besides the matching it is the step's only wait for the device that is not upstream's own.
        """
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.clip)
        norm = norm.full_tensor() if self.sharded else norm
        mean = self.accelerator.reduce(total / self.args.accumulate, "mean")
        loss, mean, norm = torch.stack([total, mean, norm]).tolist()
        for name, value in (("loss", loss), ("mean loss of all processes", mean), ("gradient's norm", norm)):
            if not math.isfinite(value):
                raise FloatingPointError(f"the {name} is {value}")
        return mean, norm

    @contextmanager
    def _named(self, paths: list[str]) -> Iterator[None]:
        """Adds the step and the images to an error about odd numbers, and the options to one about too few."""
        try:
            yield
        except ValueError as error:
            # Which norms see how many numbers is known to torch alone.
            if not str(error).startswith("Expected more than 1 value per channel"):
                raise
            raise UsageError(
                f"--image-size {self.args.image_size} with --batch-size {self.args.batch_size}: they leave a batch "
                "norm of the model one number per channel, which has no variance; use a larger one of the two"
            ) from error
        except FloatingPointError as error:
            raise UsageError(
                f"step {self.step + 1}, with {', '.join(paths)}: {error}; look at these images and their annotations, "
                f"or lower --lr {self.args.lr}"
            ) from error

    @property
    def result(self) -> nn.Module:
        """The model that is evaluated and saved."""
        return self.ema.module if self.ema is not None else self.model

    def _end_epoch(self) -> None:
        """Measures the average precision, and keeps the model if it is the best so far."""
        from accelerate.utils import broadcast_object_list, gather_object

        accelerator, images = self.accelerator, len(self.val.images)
        share: Sequence[int] = range(accelerator.process_index, images, accelerator.num_processes)
        # All processes gather a sharded layer together, so those with an image less look at the first one once more.
        looked_at = [*share, 0][: -(-images // accelerator.num_processes)] if self.sharded else share
        dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
        ids = [category["id"] for category in self.val.categories]
        model = self.result.eval()
        if accelerator.num_processes > 1:
            averaging.share(model.buffers())  # the running statistics of norms
        skipped: dict[int, str] = {}
        odd: set[int] = set()
        # Training has one input shape, which is what --compile is for; here nearly every image has another.
        with torch.compiler.set_stance("force_eager"):
            found = detect(
                model, self.processor, self.task, self.val, looked_at, dtype, ids, self.args.workers,
                quiet=not accelerator.is_main_process, skipped=skipped, odd=odd,
            )  # fmt: skip
        if self.sharded:
            model.reshard()
        if len(looked_at) > len(share):
            found = [row for row in found if row["image_id"] != self.val.images[0]["id"]]
        found = gather_object(found)
        skipped = dict(gather_object([(i, problem) for i, problem in skipped.items() if i in share]))
        if skipped and not self.args.skip_broken:
            first = next(iter(skipped.values()))
            raise UsageError(f"{first}; mend it, or leave it out with --resume --skip-broken")
        odd = set(gather_object([i for i in odd if i in share]))
        kept = [i for i in range(images) if i not in skipped]
        if kept and odd.issuperset(kept):
            raise UsageError(
                f"step {self.step}: the model gives numbers that are not finite for every image of the validation "
                f"split; begin again in another --out, with a lower --lr than {self.args.lr} or --fp32"
            )
        scores = None
        if accelerator.is_main_process:
            self._note_skipped("val", skipped.values())
            if odd:
                self._say(f"nothing found in {len(odd)} of {len(kept)} images: the model gives no finite numbers there")
            scores = average_precision(self.val, found, self.task.metric, kept)
        [scores] = broadcast_object_list([scores])
        if scores["AP"] is not None and scores["AP"] > self.best_score:
            self.best_score = scores["AP"]
            weights = sharding.weights(model, keep=accelerator.is_main_process)
            if accelerator.is_main_process:
                splits = {"train": self.train, "val": self.val}
                card = model_card(model, self.args.command_line, splits, self.task.metric, scores)
                checkpoint.save(self.best, model, self.processor, card=card, weights=weights)
        # In the log last: what is there has been done.
        self.measured = self.step
        if accelerator.is_main_process:
            epoch = self.step // self.steps_per_epoch
            self.history.add(step=self.step, epoch=epoch, metric=self.task.metric, **scores)
            self.history.draw(self.out / _CURVE)
            shown = ", ".join(f"{name} {scores[name]:.2f}" for name in ("AP", "AP50") if scores[name] is not None)
            self._say(f"epoch {epoch}: {self.task.metric} {shown or 'AP unknown: val has no objects'}")

    def _save_last(self) -> None:
        self._check_weights()
        main = self.accelerator.is_main_process
        state = {
            "step": self.step,
            "best": self.best_score,
            "settings": self.settings,
            "optimizer": sharding.whole(self.optimizer.state_dict(), keep=main),
            "schedule": self.schedule.state_dict(),
        }
        if self.ema is not None:
            state["weights"] = sharding.weights(self.model, keep=main)
        weights = sharding.weights(self.result, keep=main)
        if main:
            checkpoint.save(self.last, self.result, self.processor, state, weights=weights)
        self.accelerator.wait_for_everyone()

    def _check_weights(self) -> None:
        """Raises UsageError, in all processes, if the step has left weights that are not finite."""
        local = [getattr(p, "to_local", lambda p=p: p)() for p in self.model.parameters()]
        finite = torch.stack([p.isfinite().all() for p in local]).all().float()
        if self.accelerator.reduce(finite, "mean") < 1:
            raise UsageError(
                f"step {self.step}: it left weights that are not finite, which are not saved; lower --lr {self.args.lr}"
            )

    def _say(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


@contextmanager
def _compiling() -> Iterator[None]:
    """Room for all regions of a deep network, and one error where torch cannot compile them."""
    with torch._dynamo.config.patch(recompile_limit=REGION_VARIANTS):
        try:
            yield
        except torch._dynamo.exc.BackendCompilerFailed as error:
            reason = " ".join(str(error).partition("Set TORCHDYNAMO_VERBOSE")[0].split())[:300]
            raise UsageError(
                f"--compile: {reason}; mend that (it needs a C++ compiler), or leave --compile out"
            ) from error


def _memory_gib() -> float:
    """The most that this process has had on its GPU, else what it has in main memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    import psutil

    return psutil.Process(os.getpid()).memory_info().rss / 2**30
