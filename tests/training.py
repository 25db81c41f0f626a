"""What the tests of training and prediction share: tiny models, commands in processes of their own, and logs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from deformops_models.train import history

ROOT = Path(__file__).resolve().parents[1]
SIZE = 64


def mask2former_config(depths=(1, 1, 1, 1), drop_path_rate=0.1, **options):
    """The config of a small Mask2Former."""
    import transformers

    backbone = transformers.SwinConfig(
        embed_dim=8, depths=list(depths), num_heads=[1, 1, 2, 2], window_size=4, drop_path_rate=drop_path_rate,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    return transformers.Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=32,
        encoder_layers=1, num_attention_heads=2, dim_feedforward=32, decoder_layers=2, num_queries=10,
        train_num_points=500, **options,
    )  # fmt: skip


def write_mask2former(folder, **options):
    """Writes the config of a small Mask2Former and no weights."""
    mask2former_config(**options).save_pretrained(folder)
    return folder


def deformable_detr_config(**options):
    """The config of a small Deformable DETR."""
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    return transformers.DeformableDetrConfig(
        backbone_config=backbone, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, with_box_refine=True, **options,
    )  # fmt: skip


def write_deformable_detr(folder):
    """Writes a small Deformable DETR of another number of classes, without dropout."""
    import transformers

    config = deformable_detr_config(
        encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=12, num_labels=3, num_feature_levels=3,
        auxiliary_loss=True, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.DeformableDetrForObjectDetection(config).save_pretrained(folder)
    transformers.DeformableDetrImageProcessor().save_pretrained(folder)
    return folder


def two_images_one_empty(data, folder):
    """Every step of two processes with one image each gives one of them nothing to find."""
    for split in ("train", "val"):
        (folder / "images").mkdir(parents=True, exist_ok=True)
        (folder / "images" / split).symlink_to(data / "images" / split)
        document = json.loads((data / "annotations" / f"{split}.json").read_text())
        document["images"] = document["images"][:2]
        full = max((a["image_id"] for a in document["annotations"] if a["image_id"] <= 2), default=None)
        document["annotations"] = [a for a in document["annotations"] if a["image_id"] == full]
        (folder / "annotations").mkdir(exist_ok=True)
        (folder / "annotations" / f"{split}.json").write_text(json.dumps(document))
        assert len(document["annotations"]) > 1
    return folder


def evaluated_on_training_images(data, folder, images):
    """The first training images are those for validation too, so that a short training finds something."""
    (folder / "images").mkdir(parents=True)
    (folder / "annotations").mkdir()
    document = json.loads((data / "annotations" / "train.json").read_text())
    (folder / "annotations" / "train.json").write_text(json.dumps(document))
    document["images"] = document["images"][:images]
    kept = {image["id"] for image in document["images"]}
    document["annotations"] = [a for a in document["annotations"] if a["image_id"] in kept]
    (folder / "annotations" / "val.json").write_text(json.dumps(document))
    for split in ("train", "val"):
        (folder / "images" / split).symlink_to(data / "images" / "train")
    return folder


def losses(out):
    """(step, loss, gradient norm, rate) of each step in the log."""
    rows = [row for row in history.read(out / "log.jsonl") if "loss" in row]
    return [tuple(row[key] for key in ("step", "loss", "grad_norm", "lr")) for row in rows]


def scores(out):
    """The average precision after each epoch in the log."""
    return [row["AP"] for row in history.read(out / "log.jsonl") if "AP" in row]


def start(*arguments, processes=0):
    """Starts the command in a process of its own, or with torchrun in several."""
    launcher = ()
    if processes:
        # With an address, as the machine's own name need not be known to it.
        here = ("--standalone", "--local-addr", "127.0.0.1")
        launcher = ("-m", "torch.distributed.run", *here, "--nproc-per-node", str(processes))
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "deformops_models.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(*arguments, processes=0):
    """Runs the command as `start` does, asserts that it succeeds, and returns what it printed."""
    process = start(*arguments, processes=processes)
    try:
        printed, _ = process.communicate(timeout=250)
    finally:
        process.terminate()
    assert process.returncode == 0, printed
    return printed


def kill_one_rank(process, out, step, rank=1):
    """SIGKILLs one process of a training that torchrun runs once a step is in its log; returns what was printed."""
    import time

    import psutil

    workers, end = [], time.monotonic() + 200
    try:
        while len(losses(out)) < step and process.poll() is None and time.monotonic() < end:
            if not workers:
                workers = [
                    p for p in psutil.Process(process.pid).children() if _environment(p).get("RANK") == str(rank)
                ]
            time.sleep(0.005)
        if process.poll() is None:
            workers[0].kill()
        printed, _ = process.communicate(timeout=60)
    finally:
        process.terminate()
    return printed


def _environment(process):
    import psutil

    try:
        return process.environ()
    except psutil.Error:  # it has just begun, or ended
        return {}
