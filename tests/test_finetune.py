"""`finetune` and `eval` on tiny real models: kills, resumption, several processes, what a checkpoint is, errors."""

import argparse
import contextlib
import functools
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import weakref

import pytest
import torch

for module in ("transformers", "torchvision", "pycocotools", "accelerate", "matplotlib", "psutil"):
    pytest.importorskip(module)

import transformers  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from helpers import free_port  # noqa: E402
from PIL import Image  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402
from training import (  # noqa: E402
    ROOT,
    SIZE,
    deformable_detr_config,
    evaluated_on_training_images,
    finished,
    kill_one_rank,
    losses,
    mask2former_config,
    scores,
    start,
    two_images_one_empty,
    write_deformable_detr,
    write_mask2former,
)

from deformops_models import predict  # noqa: E402
from deformops_models.cli import main  # noqa: E402
from deformops_models.console import UsageError  # noqa: E402
from deformops_models.patching import patch, unpatch  # noqa: E402
from deformops_models.train import checkpoint, evaluate, finetune, history, sharding, tasks  # noqa: E402
from deformops_models.train.shapes import SHAPES  # noqa: E402

STEPS_PER_EPOCH = 4
COMMON = ("--device", "cpu", "--fp32", "--workers", "0", "--image-size", SIZE)


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """Accelerate's state is one per process; upstream's losses look at it."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    assert main(["shapes", "--out", str(folder), "--images", "16", "--size", str(SIZE), "--seed", "4"]) == 0
    return folder


@pytest.fixture(scope="module")
def mask2former(tmp_path_factory):
    return write_mask2former(tmp_path_factory.mktemp("mask2former"), dropout=0.1)


@pytest.fixture(scope="module")
def deformable_detr(tmp_path_factory):
    return write_deformable_detr(tmp_path_factory.mktemp("deformable-detr"))


def arguments(model, data, out, *more):
    chosen = ("--model", model, "--data", data, "--out", out, "--epochs", 2, "--batch-size", 4, "--lr", 1e-3)
    return ["finetune", *map(str, (*chosen, *COMMON, *more))]


WITHOUT_US = """
    import json, sys
    import torch
    sys.modules["deformops_models"] = None  # its import fails, as if not installed
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForUniversalSegmentation as Model

    model, loaded = Model.from_pretrained({folder!r}, output_loading_info=True)
    assert not any(loaded.values()), loaded
    processor = AutoImageProcessor.from_pretrained({folder!r})
    inputs = processor(Image.new("RGB", (80, 60)), return_tensors="pt")
    assert max(inputs["pixel_values"].shape[2:]) == 64
    with torch.no_grad():
        outputs = model.eval()(**inputs)
    assert processor.post_process_instance_segmentation(outputs, target_sizes=[(60, 80)])
    print(json.dumps(model.config.id2label))
"""


def test_killed_training_goes_on_as_if_it_had_not_been(mask2former, data, tmp_path):
    options = ("--save-every", 1, "--ema", 0.9, "--accumulate", 2, "--batch-size", 2)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(*arguments(mask2former, data, killed, *options, "--workers", 1))
    while len(losses(killed)) < STEPS_PER_EPOCH and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    printed, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, printed
    assert main(arguments(mask2former, data, whole, *options)) == 0
    _fresh()
    assert main(arguments(mask2former, data, killed, *options, "--resume")) == 0

    expected = losses(whole)
    assert [step for step, *_ in expected] == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert losses(killed) == expected
    scores = [[row for row in history.read(out / "log.jsonl") if "AP" in row] for out in (whole, killed)]
    assert scores[0] == scores[1] and len(scores[0]) == 2
    for name in ("last", "best"):
        assert {p.name for p in (killed / name).iterdir()} >= {"config.json", "model.safetensors"}
    assert (killed / "last" / "model.safetensors").read_bytes() == (whole / "last" / "model.safetensors").read_bytes()
    with Image.open(killed / "curve.png") as picture:
        assert picture.size[0] > 500
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WITHOUT_US).format(folder=str(killed / "last"))],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    names = ["circle", "square", "triangle", "star", "cross", "ring"]
    assert json.loads(out.splitlines()[-1]) == {str(i): name for i, name in enumerate(names)}


def _fresh():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_the_model_is_gone_when_the_process_group_ends(deformable_detr, data, tmp_path, monkeypatch):
    """The last to hold the group waits for its threads; a sharded model would with Python locked, which they need."""
    models, run, alive = [], finetune._Training.run, []

    def watched(training):
        models.append(weakref.ref(training.model))
        run(training)

    monkeypatch.setattr(finetune._Training, "run", watched)
    monkeypatch.setattr(finetune, "make_accelerator", lambda args, make=finetune.make_accelerator: ending(make(args)))

    def ending(accelerator):
        accelerator.end_training = lambda: alive.append(models[0]())
        return accelerator

    assert main(arguments(deformable_detr, data, tmp_path, "--epochs", 1, "--ema")) == 0
    assert alive == [None]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_one_without_objects_train_as_one(accumulate, deformable_detr, data, tmp_path):
    small = two_images_one_empty(data, tmp_path / "small")
    options = ("--epochs", 3, "--no-augment", "--accumulate", accumulate)
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(arguments(deformable_detr, small, one, *options, "--batch-size", 2)) == 0
    out = finished(*arguments(deformable_detr, small, two, *options, "--batch-size", 1), processes=2)
    assert "2 process(es)" in out and out.count("done: step 3") == 1
    for ours, theirs in zip(losses(two), losses(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert losses(two)[0] == pytest.approx(losses(one)[0], rel=1e-5)


def _noted_by_a_process(rank, command, port, file):
    """Runs the command as one of two processes; saves the model's buffers before and after the evaluation."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    end_epoch, noted = finetune._Training._end_epoch, []

    def watched(training):
        noted.append([b.clone() for b in training.model.buffers()])
        end_epoch(training)
        noted.append([b.clone() for b in training.model.buffers()])

    finetune._Training._end_epoch = watched
    assert main(command) == 0
    torch.save(noted, file.format(rank))


def test_both_processes_evaluate_the_model_that_is_saved(data, tmp_path):
    """Running statistics of batch norms differ between processes; a gradient never does."""
    command = arguments("shapes-tiny", data, tmp_path / "out", "--epochs", 1, "--batch-size", 2)
    file = str(tmp_path / "buffers{}.pt")
    torch.multiprocessing.spawn(_noted_by_a_process, (command, free_port(), file), nprocs=2)
    (before, after), (others, shared) = (torch.load(file.format(rank)) for rank in range(2))
    assert any(not torch.equal(a, b) for a, b in zip(before, others, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after, shared, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_mask2former_in_two_processes(data, tmp_path):
    small = two_images_one_empty(data, tmp_path / "small")
    # Upstream drops whole layers at this rate, and their losses with them.
    model = write_mask2former(tmp_path / "model", dropout=0.0)
    options = ("--epochs", 3, "--no-augment")
    assert main(arguments(model, small, tmp_path / "one", *options, "--batch-size", 2)) == 0
    finished(*arguments(model, small, tmp_path / "two", *options, "--batch-size", 1), processes=2)
    for ours, theirs in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        # Points are drawn at random, and upstream averages classes in each process; twice as much would be a fault.
        assert ours[1] == pytest.approx(theirs[1], rel=0.2)
    assert transformers.Mask2FormerForUniversalSegmentation.from_pretrained(tmp_path / "two" / "last")


@pytest.mark.parametrize("sharded", [(), ("--fsdp",)], ids=["whole", "fsdp"])
def test_one_process_two_and_one_go_on_from_each_other(sharded, deformable_detr, data, tmp_path, capsys):
    """The first is interrupted, one of the two is killed; losses, scores and weights are those of one process."""
    data = evaluated_on_training_images(data, tmp_path / "data", images=15)  # an image more in one process
    options = ("--epochs", 3, "--lr", 3e-3, "--no-augment", "--ema", 0.9, "--save-every", 1)
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(arguments(deformable_detr, data, one, *options)) == 0
    _fresh()
    with _interrupted(step=4):
        assert main(arguments(deformable_detr, data, two, *options)) == 130
    both = arguments(deformable_detr, data, two, *options, "--resume", *sharded, "--batch-size", 2)
    printed = kill_one_rank(start(*both, processes=2), two, step=7)
    assert "goes on at step 4 of 12" in printed
    assert f"2 process(es){' with FSDP' if sharded else ''}, fp32 on cpu" in printed
    assert re.search(r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9", printed), printed
    done = checkpoint.load_state(two / "last")["step"]
    assert 6 <= done < 12
    _fresh()
    capsys.readouterr()
    assert main(arguments(deformable_detr, data, two, *options, "--resume")) == 0
    assert f"goes on at step {done} of 12" in capsys.readouterr().out
    for ours, theirs in zip(losses(two), losses(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    assert scores(two) == pytest.approx(scores(one), rel=0.05) and scores(two)[-1] > 0
    before, ours, theirs = (
        tasks.load_model(tasks.TASKS["DeformableDETR"], str(folder), None).state_dict()
        for folder in (deformable_detr, two / "last", one / "last")
    )
    # The way that the averaged weights went; a bias in front of a norm has no gradient but rounding.
    for name in (name for name, t in theirs.items() if t.ndim > 1 and t.shape == before[name].shape):
        assert (ours[name] - theirs[name]).norm() <= 0.02 * (theirs[name] - before[name]).norm(), name


@contextlib.contextmanager
def _interrupted(step):
    """Training is interrupted in the first step after this one."""
    add = history.History.add

    def stop(self, **row):
        if row["step"] > step:
            raise KeyboardInterrupt
        add(self, **row)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(history.History, "add", stop)
        yield


def test_sharded_mask2former_of_which_one_process_has_no_objects(data, tmp_path):
    """Checkpointed layers and a frozen backbone are gathered too."""
    small = two_images_one_empty(data, tmp_path / "small")
    model = write_mask2former(tmp_path / "model", dropout=0.0)
    options = ("--epochs", 3, "--no-augment", "--freeze-backbone", "--gradient-checkpointing")
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(arguments(model, small, one, *options, "--batch-size", 2)) == 0
    finished(*arguments(model, small, two, *options, "--batch-size", 1, "--fsdp"), processes=2)
    for ours, theirs in zip(losses(two), losses(one), strict=True):
        # As without sharding.
        assert ours[1] == pytest.approx(theirs[1], rel=0.2)
    assert transformers.Mask2FormerForUniversalSegmentation.from_pretrained(two / "last")


def test_a_model_that_drops_layers_is_not_sharded(mask2former):
    model = tasks.load_model(tasks.TASKS["Mask2Former"], str(mask2former), None)
    with pytest.raises(UsageError, match="--fsdp: the model drops whole layers at the rate 0.1; set dropout to 0"):
        sharding.shard(model, torch.device("cpu"))


def test_options_that_change_how_and_not_what(mask2former, data, tmp_path, capsys):
    """Checkpointed layers give the same losses; autocast, frozen backbone, skipped objects and eval just work."""
    plain, other = tmp_path / "plain", tmp_path / "other"
    options = ("--epochs", 1, "--no-augment", "--freeze-backbone")
    assert main(arguments(mask2former, data, plain, *options)) == 0
    _fresh()
    assert main(arguments(mask2former, data, other, *options, "--gradient-checkpointing")) == 0
    for ours, theirs in zip(losses(other), losses(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    torch.manual_seed(0)
    fresh = tasks.load_model(tasks.TASKS["Mask2Former"], str(mask2former), None)
    trained = transformers.Mask2FormerForUniversalSegmentation.from_pretrained(plain / "last")
    before = dict(fresh.named_parameters())
    for name, parameter in trained.named_parameters():
        frozen = name.startswith("model.pixel_level_module.encoder.")
        assert not frozen or torch.equal(parameter, before[name]), name
    card = (plain / "best" / "README.md").read_text()
    [scores] = [row for row in history.read(plain / "log.jsonl") if "AP" in row]
    assert f"| mask AP50 on val | {scores['AP50']:.2f} % |" in card
    assert f"| val images | 3 (deformops-models shapes, 3 images for val, --size {SIZE} --seed 4) |" in card
    assert f"\ndeformops-models finetune --model {mask2former} --data {data} --out {plain} --epochs 2 " in card
    capsys.readouterr()
    model = ("--model", str(plain / "best"), "--data", str(data), "--device", "cpu", "--workers", "0")
    assert main(["eval", *model, "--limit", "2", "--compare", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["images"], report["metric"]) == (2, "segm")
    assert report["patched"]["AP"] == report["unpatched"]["AP"] is not None
    assert main(["eval", *model, "--split", "train", "--limit", "1"]) == 0
    assert "segm AP of" in capsys.readouterr().out


def test_a_compiled_training_is_the_same_training(deformable_detr, data, tmp_path, monkeypatch):
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    options = ("--epochs", 1, "--no-augment")
    assert main(arguments(deformable_detr, data, plain, *options)) == 0
    _fresh()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    quick = functools.partial(tasks.compile_regions, backend="aot_eager")
    monkeypatch.setattr("deformops_models.train.finetune.compile_regions", quick)
    assert main(arguments(deformable_detr, data, compiled, *options, "--compile")) == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2
    assert len(losses(plain)) == STEPS_PER_EPOCH
    for ours, theirs in zip(losses(compiled), losses(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert torch._dynamo.config.recompile_limit < tasks.REGION_VARIANTS


def test_no_compiler_is_one_error(deformable_detr, data, tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise FileNotFoundError("no g++")

    broken = functools.partial(tasks.compile_regions, backend=fail)
    monkeypatch.setattr("deformops_models.train.finetune.compile_regions", broken)
    torch.compiler.reset()
    assert main(arguments(deformable_detr, data, tmp_path, "--compile")) == 2
    message = capsys.readouterr().err
    assert "--compile: " in message and "no g++" in message and "leave --compile out" in message
    assert "TORCHDYNAMO" not in message


def test_a_detr_from_its_config_alone_trains_its_backbone_and_goes_on(deformable_detr, data, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "preprocessor_config.json"):
        (model / name).write_bytes((deformable_detr / name).read_bytes())
    built = tasks.load_model(tasks.find_task(str(model)), str(model), None)
    assert all(parameter.requires_grad for parameter in built.parameters())
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main(arguments(model, data, whole)) == 0
    _fresh()
    with _interrupted(step=3):
        assert main(arguments(model, data, stopped, "--save-every", 1)) == 130
    _fresh()
    assert main(arguments(model, data, stopped, "--save-every", 1, "--resume")) == 0
    assert losses(stopped) == losses(whole)


def _graphs(model):
    """Compiles a model's regions, checks a step against the eager one's, and counts the graphs."""
    inputs = {"pixel_values": torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))}

    def step():
        torch.manual_seed(3)
        model.zero_grad()
        outputs = model(**inputs)
        masks, classes = outputs.masks_queries_logits, outputs.class_queries_logits
        (masks.square().mean() + classes.square().mean()).backward()
        return {"masks": masks, "classes": classes} | {
            n: p.grad for n, p in model.named_parameters() if p.grad is not None
        }

    expected = step()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    state = list(model.state_dict())
    regions = tasks.compile_regions(model.model, backend="aot_eager", dynamic=False)
    assert list(model.state_dict()) == state
    limit = {"recompile_limit": tasks.REGION_VARIANTS, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limit):
        actual = step()
    assert actual.keys() == expected.keys()
    for name, t in expected.items():
        torch.testing.assert_close(actual[name], t, rtol=1e-4, atol=1e-6)
    held = [type(m).__name__ for m in regions]
    assert (
        held.count("SwinLayer") == sum(type(m).__name__ == "SwinLayer" for m in model.modules())
        and held.count("Mask2FormerMaskedAttentionDecoderLayer") == 1
    )
    # What is not in a region is a container of regions, or one operation.
    inside = {id(m) for region in regions for m in region.modules()}
    rest = [m for m in model.model.modules() if id(m) not in inside and not list(m.children())]
    assert {type(m).__module__.partition(".")[0] for m in rest} <= {"torch"}
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_layers_that_are_alike_are_compiled_once():
    def graphs(depth, rate=0.0):
        config = mask2former_config(depths=[1, 1, depth, 1], drop_path_rate=rate)
        return _graphs(patch(transformers.Mask2FormerForUniversalSegmentation(config).train()))

    shallow = graphs(2)
    assert graphs(6) == shallow
    # Each rate of dropped paths is a graph of its own, and none is left out.
    assert graphs(12, 0.2) == shallow + 10


@pytest.mark.parametrize("name", ["mask2former", "deformable_detr"])
@pytest.mark.parametrize("objects", [0, 2])
def test_all_that_is_trained_has_a_gradient(objects, name, request):
    """Else the sum of several GPUs' gradients waits for the device in every step."""
    folder = str(request.getfixturevalue(name))
    task = tasks.find_task(folder)
    model = tasks.load_model(task, folder, None).train()
    for module in model.modules():
        if hasattr(module, "layerdrop"):
            module.layerdrop = 0.0  # or a layer may be left out
    tasks.freeze_unread(model, task)
    found = {
        "labels": torch.zeros(objects, dtype=torch.long),
        "masks": torch.ones(objects, SIZE, SIZE),
        "boxes": torch.tensor([9.0, 9.0, 50.0, 50.0]).expand(objects, 4),
    }
    model(pixel_values=torch.randn(1, 3, SIZE, SIZE), **task.targets(found, [objects], SIZE)).loss.backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    still = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert len(still) == (2 if name == "mask2former" else 0), still


@pytest.mark.parametrize("name", ["mask2former", "deformable_detr"])
def test_parameter_groups_are_found_by_name_in_patched_models(name, request):
    folder = request.getfixturevalue(name)
    task = tasks.find_task(str(folder))
    model = tasks.load_model(task, str(folder), None)
    upstream = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = tasks.parameter_groups(model, task, lr=1.0, weight_decay=0.5, backbone_scale=0.25)
    rates = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert len(rates) == len(upstream) == sum(len(g["params"]) for g in groups)
    slow = [n for n, p in upstream.items() if rates[id(p)][0] == 0.1]
    assert slow and all("sampling_offsets" in n or "reference_points" in n for n in slow)
    backbone = {n for n, p in upstream.items() if rates[id(p)][0] == 0.25}
    assert backbone == {n for n in upstream if n.startswith(task.backbone)} and len(backbone) > 5
    still = {n for n, p in upstream.items() if rates[id(p)][1] == 0}
    assert still == {
        n for n, p in upstream.items()
        if p.ndim == 1 or n.endswith(("level_embed", "position_bias_table"))
        or any(k in n for k in ("level_embed.", "query_position_embeddings.", "queries_embedder.", "queries_features."))
    }  # fmt: skip


def test_tiny_config_fits_six_megabytes():
    model = tasks.load_model(tasks.TASKS["Mask2Former"], "shapes-tiny", {i: str(i) for i in range(6)})
    assert sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())) < 6e6


# Classes


NAMES = ("cat", "dog", "bird", "fish")


@pytest.fixture(params=["mask2former", "shared heads", "two-stage"])
def named(request, tmp_path):
    """The folder of a small model that knows `NAMES`, and its task."""
    torch.manual_seed(5)
    classes = {"id2label": dict(enumerate(NAMES)), "label2id": {name: i for i, name in enumerate(NAMES)}}
    if request.param == "mask2former":
        model = transformers.Mask2FormerForUniversalSegmentation(mask2former_config(**classes))
    else:
        options = {"two_stage": True, "two_stage_num_proposals": 12} if request.param == "two-stage" else {}
        config = deformable_detr_config(
            encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=12, num_feature_levels=3, **options, **classes
        )
        model = transformers.DeformableDetrForObjectDetection(config)
    with torch.no_grad():  # upstream's biases are all zero
        for name, parameter in model.named_parameters():
            if "class_" in name and parameter.ndim == 1:
                parameter.normal_()
    model.save_pretrained(tmp_path / "named")
    return tasks.find_task(str(tmp_path / "named")), tmp_path / "named"


def _rows(model):
    """Weights and bias of each class in every head (heads, classes, 33), but the one that chooses queries."""
    chooses = f"class_embed.{model.config.decoder_layers}"
    heads = [m for n, m in model.named_modules() if re.search(r"class_(predictor|embed\.\d+)$", n) and chooses not in n]
    assert len(heads) == 1 or len(heads) % 2 == 0
    return torch.stack([torch.cat([head.weight, head.bias[:, None]], dim=1) for head in heads]).detach()


def _logits(model):
    pixels = torch.randn(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        outputs = model.eval()(pixels)
    return outputs["class_queries_logits" if "class_queries_logits" in outputs else "logits"]


def _load(task, folder, names):
    said = []
    torch.manual_seed(7)
    return tasks.load_model(task, str(folder), dict(enumerate(names)), say=said.append), said


def test_classes_in_another_order_keep_their_weights(named, tmp_path):
    task, folder = named
    before = tasks.load_model(task, str(folder), None)
    model, said = _load(task, folder, ["Fish", "cat", "dog", "bird"])
    rows = [3, 0, 1, 2, *range(4, _rows(before).shape[1])]
    assert torch.equal(_rows(model), _rows(before)[:, rows])
    torch.testing.assert_close(_logits(model), _logits(before)[..., rows])
    assert said == ["4 of 4 classes keep the weights that the model's classifier has for their names"]
    model.save_pretrained(tmp_path / "saved")
    again, said = _load(task, tmp_path / "saved", ["Fish", "cat", "dog", "bird"])
    assert torch.equal(_rows(again), _rows(model)) and said == []


def test_known_classes_keep_their_weights_among_new_ones(named):
    task, folder = named
    before = _rows(tasks.load_model(task, str(folder), None))
    model, said = _load(task, folder, ["horse", "bird", "ox", "dog", "cow"])
    after = _rows(model)
    assert after.shape[1] == before.shape[1] + 1 and model.config.num_labels == 5
    assert torch.equal(after[:, [1, 3]], before[:, [2, 1]])
    assert torch.equal(after[:, 5:], before[:, 4:])  # Mask2Former's "no object"
    assert (after[:, 0, -1] == 0).all() and (after[:, 0].std(-1) > 0).all()
    assert said == [
        "2 of 5 classes keep the weights that the model's classifier has for their names; the others start anew"
    ]
    pictures = {"pixel_values": torch.randn(1, 3, SIZE, SIZE)}
    objects = {
        "labels": torch.tensor([4]),
        "masks": torch.ones(1, SIZE, SIZE),
        "boxes": torch.tensor([[9.0, 9, 50, 50]]),
    }
    model.train()(**pictures, **task.targets(objects, [1], SIZE)).loss.backward()


def test_other_classes_start_anew_and_those_without_names_stay(named):
    task, folder = named
    before = _rows(tasks.load_model(task, str(folder), None))
    model, said = _load(task, folder, ["a", "b", "c", "d"])
    assert not torch.isclose(_rows(model), before).any()
    assert said == ["the model knows none of the data's classes by name: its classifier starts anew"]
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": {str(i): f"LABEL_{i}" for i in range(4)}, "label2id": {f"LABEL_{i}": i for i in range(4)}}
    (folder / "config.json").write_text(json.dumps(config))
    model, said = _load(task, folder, ["a", "b", "c", "d"])
    assert torch.equal(_rows(model), before) and model.config.id2label[3] == "d"
    assert said == ["the model's classes have no names: its classifier keeps their weights by position"]


def test_the_head_that_chooses_queries_has_no_classes(tmp_path):
    config = deformable_detr_config(
        encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=12, num_feature_levels=3, two_stage=True,
        two_stage_num_proposals=12, id2label=dict(enumerate(NAMES)),
    )  # fmt: skip
    transformers.DeformableDetrForObjectDetection(config).save_pretrained(tmp_path)
    task = tasks.find_task(str(tmp_path))
    before = tasks.load_model(task, str(tmp_path), None).class_embed[-1]
    for names in (["dog", "cat", "fish", "bird"], ["dog", "horse"], ["a", "b", "c", "d", "e"]):
        model, _ = _load(task, tmp_path, names)
        after, same = model.class_embed[-1], min(len(names), 4)
        assert after.weight is model.model.decoder.class_embed[-1].weight and len(after.weight) == len(names)
        assert torch.equal(after.weight[:same], before.weight[:same])


def test_finetune_says_what_becomes_of_the_classes(deformable_detr, data, tmp_path, capsys):
    assert main(arguments(deformable_detr, data, tmp_path / "one", "--epochs", 1)) == 0
    anew = "the model knows none of the data's classes by name: its classifier starts anew\n"
    assert capsys.readouterr().out.count(anew) == 1
    _fresh()
    other = _changed(data, tmp_path / "other", lambda document: document["categories"][5].update(name="rings"))
    assert main(arguments(tmp_path / "one" / "last", other, tmp_path / "two", "--epochs", 1)) == 0
    assert "5 of 6 classes keep the weights that" in capsys.readouterr().out
    _fresh()
    assert main(arguments(tmp_path / "one" / "last", other, tmp_path / "two", "--epochs", 1, "--resume")) == 0
    assert "classifier" not in capsys.readouterr().out
    evaluate = ["eval", "--data", str(other), "--device", "cpu", "--workers", "0", "--model"]
    assert main([*evaluate, str(tmp_path / "two" / "last")]) == 0
    assert main([*evaluate, str(tmp_path / "one" / "last")]) == 2
    assert "not rings of" in (message := capsys.readouterr().err) and "has not its ring; " in message


def _changed(data, folder, change, splits=("train", "val")):
    """The same images, with annotations that `change` was applied to."""
    (folder / "annotations").mkdir(parents=True)
    (folder / "images").symlink_to(data / "images")
    for split in ("train", "val"):
        document = json.loads((data / "annotations" / f"{split}.json").read_text())
        if split in splits:
            change(document)
        (folder / "annotations" / f"{split}.json").write_text(json.dumps(document))
    return folder


# Averaged weights


@pytest.mark.parametrize(
    ("names", "known", "positions"),
    [
        (["b", "a"], ["a", "b"], [1, 0]),
        (["Dog"], ["Cat", "cat", "dog"], [2]),
        (["CAT"], ["Cat", "cat"], [None]),
        (["cat", "Cat"], ["Cat"], [None, 0]),
        (["bird"], ["cat"], [None]),
    ],
)
def test_names_match_in_another_case_where_it_is_clear(names, known, positions):
    assert tasks.match_names(names, known) == positions


@pytest.mark.parametrize(("updates", "decay"), [(0, 0.0), (1, 2 / 11), (20, 21 / 30), (10**6, 0.999)])
def test_averaged_weights_follow_the_model_soon(updates, decay):
    model, training = torch.nn.Linear(1, 1, bias=False), object.__new__(finetune._Training)
    training.args, training.step = argparse.Namespace(ema=0.999), updates
    average = AveragedModel(model, multi_avg_fn=training._decayed)
    average.n_averaged.fill_(updates)
    with torch.no_grad():
        average.module.weight.fill_(1.0)
        model.weight.fill_(2.0)
    average.update_parameters(model)
    assert average.module.weight.item() == pytest.approx(2 - decay)


def test_averaged_weights_of_a_short_training_have_learnt(deformable_detr, data, tmp_path):
    assert main(arguments(deformable_detr, data, tmp_path, "--ema")) == 0
    weights = checkpoint.load_state(tmp_path / "last")["weights"]
    task = tasks.TASKS["DeformableDETR"]
    start, averaged = (tasks.load_model(task, str(f), None).state_dict() for f in (deformable_detr, tmp_path / "last"))
    name = "model.query_position_embeddings.weight"
    assert (averaged[name] - weights[name]).norm() < 0.5 * (start[name] - weights[name]).norm()


# Folders that are replaced whole


def _write(folder, text):
    with checkpoint.whole_folder(folder) as new:
        (new / "file").write_text(text)


def test_weights_are_as_readable_as_any_file(deformable_detr, tmp_path):
    model = transformers.DeformableDetrForObjectDetection.from_pretrained(deformable_detr)
    processor = transformers.DeformableDetrImageProcessor.from_pretrained(deformable_detr)
    checkpoint.save(tmp_path / "saved", model, processor)
    (tmp_path / "plain").touch()
    expected = (tmp_path / "plain").stat().st_mode
    found = {file.name: file.stat().st_mode for file in (tmp_path / "saved").iterdir()}
    assert "model.safetensors" in found and set(found.values()) == {expected}


def test_folder_is_replaced_whole_or_not_at_all(tmp_path):
    folder, new, old = (tmp_path / name for name in ("last", ".last.new", ".last.old"))

    def recovered():
        checkpoint.recover(folder)
        assert not new.exists() and not old.exists()
        return (folder / "file").read_text()

    _write(folder, "1")
    with pytest.raises(ZeroDivisionError), checkpoint.whole_folder(folder) as temporary:
        (temporary / "file").write_text("2")
        raise ZeroDivisionError
    assert recovered() == "1"
    new.mkdir()  # killed while writing
    (new / "file").write_text("half")
    assert recovered() == "1"
    folder.rename(old)  # killed between the renames
    new.mkdir()
    (new / "file").write_text("2")
    assert recovered() == "2"
    folder.rename(new)  # killed before the old one was removed
    new.rename(folder)
    old.mkdir()
    assert recovered() == "2"
    _write(folder, "3")
    assert recovered() == "3"


def test_full_disk_is_one_error_and_leaves_the_checkpoint_before(mask2former, data, tmp_path, capsys, monkeypatch):
    assert main(arguments(mask2former, data, tmp_path, "--epochs", 1)) == 0
    before = (tmp_path / "last" / "model.safetensors").read_bytes()
    _fresh()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    capsys.readouterr()
    out = tmp_path / "last"
    with pytest.raises(checkpoint.UsageError, match=r"cannot write the checkpoint .*last: .*No space left on device"):
        checkpoint.save(out, _Saves(), _Saves(), {})
    assert (out / "model.safetensors").read_bytes() == before
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    assert main(arguments(mask2former, data, tmp_path / "new", "--epochs", 1)) == 2
    assert "GiB are free there, the checkpoints need up to" in capsys.readouterr().err


def test_disk_that_fills_up_between_checkpoints_is_one_error(mask2former, data, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(history.History, "add", full)
    assert main(arguments(mask2former, data, tmp_path)) == 2
    assert "stopped by [Errno 28] No space left on device; mend that and go on" in capsys.readouterr().err


class _Saves:
    def save_pretrained(self, folder, state_dict=None):
        (folder / "model.safetensors").write_bytes(b"half")


# Errors


def test_going_on_needs_resume_and_the_same_arguments(mask2former, data, tmp_path, capsys):
    run = arguments(mask2former, data, tmp_path, "--epochs", 1)
    assert main([*run, "--resume"]) == 0  # nothing to go on from yet: starts
    before = losses(tmp_path)
    for more, message in (
        ([], "holds a training at step 4; add --resume"),
        (["--resume", "--lr", "0.5"], "--lr 0.5: the training in"),
        (["--resume", "--batch-size", "2"], "--batch-size x --accumulate x number of processes 2: the training in"),
    ):
        _fresh()
        capsys.readouterr()
        assert main([*run, *more]) == 2
        assert message in capsys.readouterr().err
    _fresh()
    assert main([*run, "--resume", "--batch-size", "2", "--accumulate", "2"]) == 0
    assert "done: step 4" in capsys.readouterr().out and losses(tmp_path) == before


def test_damaged_log_is_one_error(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    assert history.read(file) == [{"step": 1}, {"step": 2}]
    file.write_bytes(b'{"step": 1}\n\x00\xff\n{"step": 3}\n')
    with pytest.raises(UsageError, match=r"log.jsonl, line 2: .*; take this line out of it"):
        history.read(file)
    for line in (b"{}", b"3", b'{"step": "x"}'):
        file.write_bytes(b'{"step": 1}\n' + line + b"\n")
        with pytest.raises(UsageError, match=r"log.jsonl, line 2: it says no step; take this line out of it"):
            history.read(file)


def test_a_new_training_does_not_replace_the_best_of_another(mask2former, data, tmp_path, capsys):
    best = tmp_path / "best" / "model.safetensors"
    best.parent.mkdir()
    best.write_bytes(b"kept")
    assert main(arguments(mask2former, data, tmp_path)) == 2
    assert "a new training would replace its best/; choose another --out" in capsys.readouterr().err
    assert best.read_bytes() == b"kept"


def test_a_training_that_lost_its_last_checkpoint_does_not_begin_again(deformable_detr, data, tmp_path, capsys):
    command = arguments(deformable_detr, data, tmp_path, "--epochs", 1, "--resume")
    assert main(command) == 0
    shutil.rmtree(tmp_path / "last")
    (tmp_path / "skipped-train.txt").write_text("000004.jpg: not an image\n")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    _fresh()
    assert main(command) == 2
    message = "there is no last/ to go on from, and a new training would replace its best/; choose another --out"
    assert message in capsys.readouterr().err
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_one_number_per_channel_is_one_error(data, tmp_path, capsys):
    command = arguments("shapes-tiny", data, tmp_path, "--image-size", 32, "--batch-size", 1)
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "--image-size 32 with --batch-size 1: they leave a batch norm" in message and "use a larger one" in message


def test_an_image_processor_without_normalization(deformable_detr, data, tmp_path):
    model = shutil.copytree(deformable_detr, tmp_path / "model")
    options = {"do_normalize": False, "image_mean": None, "image_std": None}
    transformers.DeformableDetrImageProcessor(**options).save_pretrained(model)
    assert main(arguments(model, data, tmp_path / "out", "--epochs", 1)) == 0
    saved = json.loads((tmp_path / "out" / "best" / "preprocessor_config.json").read_text())
    assert saved["do_normalize"] is False


def test_turned_images_are_counted(deformable_detr, data, tmp_path, capsys):
    turned = shutil.copytree(data, tmp_path / "turned")
    exif = Image.Exif()
    exif[0x0112] = 3
    for name in ("train/000001", "train/000002", "val/000001"):
        with Image.open(turned / "images" / f"{name}.jpg") as image:
            image.save(turned / "images" / f"{name}.jpg", exif=exif)
    assert main(arguments(deformable_detr, turned, tmp_path / "out", "--epochs", 1)) == 0
    printed = capsys.readouterr().out
    for count, split in ((2, "train"), (1, "val")):
        assert f"images of {split} turned as their EXIF orientation says: {count}\n" in printed
    evaluate = ("--device", "cpu", "--workers", "0", "--json")
    assert main(["eval", "--model", str(tmp_path / "out" / "last"), "--data", str(turned), *evaluate]) == 0
    printed = capsys.readouterr()
    assert "images turned as their EXIF orientation says: 1\n" in printed.err and json.loads(printed.out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eval_refuses_outputs_that_are_not_finite(dtype, deformable_detr, data, tmp_path, capsys):
    model = tasks.load_model(tasks.TASKS["DeformableDETR"], str(deformable_detr), dict(enumerate(SHAPES)))
    with torch.no_grad():
        model.class_embed[-1].bias.fill_(float("nan"))
    model.save_pretrained(tmp_path)
    options = ("--data", str(data), "--device", "cpu", "--workers", "0", "--dtype", dtype)
    assert main(["eval", "--model", str(tmp_path), *options]) == 2
    message = capsys.readouterr().err
    assert f".jpg: the model gives numbers that are not finite in {dtype} on cpu" in message
    assert (": use --dtype float32" in message) == (dtype == "bfloat16")


def test_one_image_without_finite_outputs_costs_no_training(deformable_detr, data, tmp_path, capsys, monkeypatch):
    check, looked = evaluate.check_finite, []

    def broken(*arguments):
        looked.append(arguments)
        if len(looked) == 1:
            raise predict.UnfitError("odd")
        check(*arguments)

    monkeypatch.setattr(evaluate, "check_finite", broken)
    assert main(arguments(deformable_detr, data, tmp_path, "--epochs", 1)) == 0
    text = f"nothing found in 1 of {len(looked)} images: the model gives no finite numbers there"
    assert len(looked) > 1 and text in capsys.readouterr().out


def test_finetune_refuses_outputs_that_are_not_finite(deformable_detr, data, tmp_path, capsys, monkeypatch):
    def broken(self):
        model = self.model.eval()
        model.class_embed[-1].bias.data.fill_(float("nan"))
        return model

    monkeypatch.setattr(finetune._Training, "result", property(broken))
    monkeypatch.setattr(finetune._Training, "_save_last", lambda self: None)
    assert main(arguments(deformable_detr, data, tmp_path, "--epochs", 1)) == 2
    message = capsys.readouterr().err
    assert f"step {STEPS_PER_EPOCH}: the model gives numbers that are not finite for every image of the val" in message


@pytest.mark.parametrize("name", ["mask2former", "deformable_detr"])
def test_numbers_that_are_not_finite_stop_with_step_and_images(name, data, tmp_path, capsys, request):
    model = request.getfixturevalue(name)
    assert main(arguments(model, data, tmp_path, "--lr", 1e30, "--warmup", 0)) == 2
    message = capsys.readouterr().err
    assert "step 2, with " in message and " logits are not finite" in message and message.count(".jpg") == 4
    assert "images/train/" in message and "--lr 1e+30" in message


def test_gradient_that_is_not_finite_stops_before_the_step(mask2former, data, tmp_path, capsys, monkeypatch):
    from accelerate import Accelerator

    monkeypatch.setattr(Accelerator, "clip_grad_norm_", lambda *_: torch.tensor(float("nan")))
    assert main(arguments(mask2former, data, tmp_path)) == 2
    message = capsys.readouterr().err
    assert "step 1, with " in message and ".jpg: the gradient's norm is nan; " in message and message.count(".jpg") == 4


def test_loss_that_is_not_finite_stops_before_the_step(deformable_detr, data, tmp_path, capsys, monkeypatch):
    from deformops_models.patches import transformers_losses

    compute = transformers_losses._box_losses
    monkeypatch.setattr(
        transformers_losses, "_box_losses", lambda *a: {k: v + torch.inf for k, v in compute(*a).items()}
    )
    assert main(arguments(deformable_detr, data, tmp_path)) == 2
    message = capsys.readouterr().err
    assert ".jpg: the loss is inf; " in message and message.count(".jpg") == 4
    assert history.read(tmp_path / "log.jsonl") == []


def test_a_model_of_which_a_part_is_not_known_is_not_trained(deformable_detr, data, tmp_path, capsys, monkeypatch):
    def load(*args, **options):
        return patch(unpatch(tasks.load_model(*args, **options)), parts=("attention",))

    monkeypatch.setattr("deformops_models.train.finetune.load_model", load)
    assert main(arguments(deformable_detr, data, tmp_path)) == 2
    assert "this version of transformers is not one known here" in capsys.readouterr().err


def test_broken_data_sets(mask2former, data, tmp_path, capsys):
    broken = shutil.copytree(data, tmp_path / "broken")
    file = broken / "annotations" / "train.json"
    document = json.loads(file.read_text())
    document["annotations"][3]["category_id"] = 99
    file.write_text(json.dumps(document))
    (broken / "images" / "train" / "000002.jpg").unlink()
    out = tmp_path / "out"
    assert main(arguments(mask2former, broken, out)) == 2
    message = capsys.readouterr().err
    assert "000002.jpg" in message and "no such file" in message and "--skip-broken" in message
    assert not (out / "log.jsonl").exists()
    _fresh()
    assert main(arguments(mask2former, broken, out, "--epochs", 1, "--skip-broken")) == 0
    assert "left out of train: 1 x no such file, 1 x unknown category" in capsys.readouterr().out
    assert (out / "skipped-train.txt").read_text().count("\n") == 2


def test_images_that_turn_out_to_be_cut_off(deformable_detr, data, tmp_path, capsys, monkeypatch):
    cut = shutil.copytree(data, tmp_path / "cut")
    for file in (cut / "images" / "train" / "000004.jpg", cut / "images" / "val" / "000001.jpg"):
        file.write_bytes(file.read_bytes()[:900])  # with a sound header
    out = tmp_path / "out"
    command = arguments(deformable_detr, cut, out, "--save-every", 1)
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "000004.jpg: cannot read it" in message and "leave it out with --resume --skip-broken" in message
    _fresh()
    command += ["--skip-broken", "--workers", "1"]
    with monkeypatch.context() as patch:
        # Killed while it measures the first epoch, and while it drew.
        patch.setattr(finetune, "average_precision", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main([*command, *(["--resume"] if (out / "last").exists() else [])]) == 130
    (out / ".curve-abc.png").touch()
    _fresh()
    assert main([*command, "--resume"]) == 0
    assert not (out / ".curve-abc.png").exists() and (out / "curve.png").exists()
    assert [len((out / f"skipped-{split}.txt").read_text().splitlines()) for split in ("train", "val")] == [1, 1]
    printed = capsys.readouterr().out
    assert printed.count("left out of train: ") == printed.count("left out of val: ") == 1
    assert "000004.jpg: cannot read it" in (out / "skipped-train.txt").read_text()
    assert "000001.jpg: cannot read it" in (out / "skipped-val.txt").read_text()
    evaluate = ("eval", "--model", str(out / "last"), "--data", str(cut), "--device", "cpu", "--workers", "0")
    assert main([*evaluate]) == 2
    assert "000001.jpg: cannot read it" in capsys.readouterr().err
    assert main([*evaluate, "--skip-broken", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["images"] == len(list((cut / "images/val").iterdir())) - 1
    assert re.search(r"^left out: .*000001.jpg: cannot read it", printed.err, re.MULTILINE)


def test_a_cut_off_image_for_validation_costs_no_step(deformable_detr, data, tmp_path, capsys):
    cut = shutil.copytree(data, tmp_path / "cut")
    file = cut / "images" / "val" / "000001.jpg"
    file.write_bytes(file.read_bytes()[:900])
    command = arguments(deformable_detr, cut, tmp_path / "out")
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "000001.jpg: cannot read it" in message and "leave it out with --resume --skip-broken" in message
    _fresh()
    assert main([*command, "--resume", "--skip-broken"]) == 0
    assert f"goes on at step {STEPS_PER_EPOCH} of {2 * STEPS_PER_EPOCH}" in capsys.readouterr().out
    # The first epoch is measured before the second begins.
    assert len(losses(tmp_path / "out")) == 2 * STEPS_PER_EPOCH and len(scores(tmp_path / "out")) == 2
    assert (tmp_path / "out" / "best").is_dir()


def test_an_image_for_validation_that_is_gone_costs_no_step(deformable_detr, data, tmp_path, capsys):
    gone = shutil.copytree(data, tmp_path / "gone")
    command = arguments(deformable_detr, gone, tmp_path / "out", "--epochs", 1)
    assert main(command) == 0
    (gone / "images" / "val" / "000001.jpg").unlink()
    _fresh()
    assert main([*command, "--resume"]) == 2
    assert "no such file" in capsys.readouterr().err
    _fresh()
    assert main([*command, "--resume", "--skip-broken"]) == 0


def test_a_last_epoch_that_was_not_measured_is(deformable_detr, data, tmp_path, monkeypatch):
    command = arguments(deformable_detr, data, tmp_path / "whole")
    assert main(command) == 0
    _fresh()
    whole, measure, calls = tmp_path / "whole", finetune.average_precision, []

    def killed(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(finetune, "average_precision", killed)
    command[command.index(str(whole))] = str(tmp_path / "out")
    assert main(command) == 130
    _fresh()
    assert main([*command, "--resume"]) == 0
    assert len(calls) == 3
    assert history.read(tmp_path / "out" / "log.jsonl")[-1] == history.read(whole / "log.jsonl")[-1]
    for name in ("last", "best"):
        one, other = (folder / name / "model.safetensors" for folder in (whole, tmp_path / "out"))
        assert one.read_bytes() == other.read_bytes()


def test_weights_that_are_not_finite_are_not_saved(deformable_detr, data, tmp_path, capsys, monkeypatch):
    step = torch.optim.AdamW.step

    def diverge(self, *args, **kwargs):
        step(self, *args, **kwargs)
        with torch.no_grad():
            self.param_groups[0]["params"][0].flatten()[0] = float("inf")

    monkeypatch.setattr(torch.optim.AdamW, "step", diverge)
    assert main(arguments(deformable_detr, data, tmp_path, "--epochs", 1, "--batch-size", 16)) == 2
    assert "step 1: it left weights that are not finite, which are not saved; lower --lr" in capsys.readouterr().err
    assert not (tmp_path / "last").exists() and not (tmp_path / "best").exists()


def test_a_checkpoint_of_other_sizes_is_one_error(deformable_detr, data, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(arguments(deformable_detr, data, out, "--epochs", 1)) == 0
    config = json.loads((out / "best" / "config.json").read_text())
    (out / "best" / "config.json").write_text(json.dumps(config | {"num_queries": config["num_queries"] + 1}))
    capsys.readouterr()
    for command in (
        ["eval", "--model", str(out / "best"), "--data", str(data), "--device", "cpu", "--workers", "0"],
        arguments(out / "best", data, tmp_path / "again"),
    ):
        _fresh()
        assert main(command) == 2
        assert "query_position_embeddings.weight with shape" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["model.safetensors", "preprocessor_config.json"])
def test_a_checkpoint_that_lost_a_file_is_not_gone_on_from(file, mask2former, data, tmp_path, capsys):
    assert main(arguments(mask2former, data, tmp_path, "--epochs", 1)) == 0
    (tmp_path / "last" / file).unlink()
    _fresh()
    assert main(arguments(mask2former, data, tmp_path, "--epochs", 1, "--resume")) == 2
    assert f"{tmp_path / 'last'}: its weights or preprocessor_config.json are gone" in capsys.readouterr().err


def test_two_trainings_in_one_folder(deformable_detr, data, tmp_path, capsys):
    hold = """
        import sys
        from pathlib import Path
        from deformops_models.train.checkpoint import claimed

        with claimed(Path(sys.argv[1])):
            print("held", flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(hold), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        assert main(arguments(deformable_detr, data, tmp_path)) == 2
        assert f"--out {tmp_path}: another training runs there" in capsys.readouterr().err
        other.kill()
    _fresh()
    assert main(arguments(deformable_detr, data, tmp_path, "--epochs", 1)) == 0
    assert not list(tmp_path.glob(".*"))
    (tmp_path / "other" / ".lock").mkdir(parents=True)
    _fresh()
    assert main(arguments(deformable_detr, data, tmp_path / "other")) == 2
    assert f"--out {tmp_path / 'other'}: stopped by " in capsys.readouterr().err


def test_a_training_goes_on_with_its_own_data_and_precision_only(deformable_detr, data, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(arguments(deformable_detr, data, out, "--epochs", 1)) == 0
    seed = ["shapes", "--out", str(tmp_path / "other"), "--images", "16", "--size", str(SIZE), "--seed", "5"]
    assert main(seed) == 0
    for change, message in (
        (("--data", tmp_path / "other"), "--data with the training set "),
        (("--bf16",), "precision bf16: the training in "),
        (("--no-augment",), "--no-augment: the training in "),
    ):
        _fresh()
        command = [c for c in arguments(deformable_detr, data, out, "--epochs", 1, "--resume") if c != "--fp32"]
        assert main([*command, *map(str, change), *(["--fp32"] if change != ("--bf16",) else [])]) == 2
        assert message in capsys.readouterr().err


def test_a_training_goes_on_with_its_own_validation_set_only(deformable_detr, data, tmp_path, capsys):
    out, options = tmp_path / "out", ("--epochs", 1, "--resume")
    assert main(arguments(deformable_detr, data, out, *options)) == 0
    other = _changed(data, tmp_path / "other", lambda document: document["annotations"].pop(), ["val"])
    command = arguments(deformable_detr, other, out, *options)
    _fresh()
    assert main(command) == 2
    message = capsys.readouterr().err
    assert "--data with the validation set " in message and "had with the validation set " in message
    # Older checkpoints do not say which it was.
    state = checkpoint.load_state(out / "last")
    del state["settings"]["val"]
    torch.save(state, out / "last" / checkpoint.STATE)
    _fresh()
    assert main(command) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", 0], "--epochs 0: the least is 1"),
        (["--workers", -1], "--workers -1: the least is 0"),
        (["--seed", 2**63], f"--seed {2**63}: the most is {2**63 - 1}"),
        (["--lr", 0], "--lr 0.0: it has to be positive"),
        (["--lr", "nan"], "--lr nan: it has to be positive"),
        (["--lr", "inf"], "--lr inf: float32 does not hold it"),
        (["--backbone-scale", "1e39"], "--backbone-scale 1e+39: float32 does not hold it"),
        (["--weight-decay", -1], "--weight-decay -1.0: the least is 0"),
        (["--backbone-scale", -1], "--backbone-scale -1.0: the least is 0"),
        (["--warmup", 10**6], "--warmup 1000000: the whole training has "),
        (["--ema", 2], "--ema 2.0: it is a decay between 0 and 1"),
        (["--image-size", 100], "--image-size 100: use a multiple of 32"),
        (["--model", "mask3former"], "unknown checkpoint 'mask3former'"),
        (["--model", "./nowhere"], "--model ./nowhere: no such folder"),
        (["--model", "dino-4scale-r50"], "mmdet"),
        (["--data", "/nowhere"], "--data /nowhere: no such folder"),
        (["--device", "tpu"], "--device tpu: use cpu or cuda"),
        (["--bf16"], "not allowed with argument"),
        (["--fsdp", "--compile"], "--fsdp: it does not go with --compile"),
        (["--compile", "reduce-overhead", "--accumulate", 2], "--accumulate 2: the CUDA graphs of "),
        (
            ["--compile", "reduce-overhead", "--gradient-checkpointing"],
            "--gradient-checkpointing: it does not go with --compile reduce-overhead; use --compile alone",
        ),
        (["--compile", "reduce-overhead"], "--compile reduce-overhead: CUDA graphs need a CUDA GPU; use --compile"),
        (["--compile", "fast"], "argument --compile: invalid choice: 'fast'"),
    ],
)
def test_arguments_are_checked_before_anything_runs(options, message, mask2former, data, tmp_path, capsys):
    from deformops_models import checkpoints

    mmdet = next(row.alias for row in checkpoints() if row.framework == "mmdet")
    options = [mmdet if option == "dino-4scale-r50" else option for option in options]
    assert main(arguments(mask2former, data, tmp_path / "out", *options)) == 2
    assert message in capsys.readouterr().err


def test_accelerate_set_to_fsdp_is_refused(mask2former, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert main(arguments(mask2former, data, tmp_path / "out")) == 2
    assert "launch with --multi_gpu in its place, and give finetune --fsdp" in capsys.readouterr().err


def test_gpu_that_emulates_bfloat16_is_refused(mask2former, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    run = arguments(mask2former, data, tmp_path / "out")
    run = [a for a in run if a not in ("--fp32", "--device", "cpu")]
    assert main([*run, "--bf16"]) == 2
    assert "--bf16: Tesla T4 has no bfloat16 of its own" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "least"), [("--workers", 0), ("--limit", 1), ("--image-size", 1)])
def test_eval_checks_its_numbers(option, least, deformable_detr, data, capsys):
    options = ["--model", str(deformable_detr), "--data", str(data), "--device", "cpu", option, str(least - 1)]
    assert main(["eval", *options]) == 2
    assert f"{option} {least - 1}: the least is {least}" in capsys.readouterr().err


def test_eval_needs_weights_and_known_classes(mask2former, deformable_detr, data, capsys):
    common = ("--data", str(data), "--device", "cpu", "--workers", "0")
    assert main(["eval", "--model", str(mask2former), *common]) == 2
    assert "it has no weights to evaluate" in capsys.readouterr().err
    assert main(["eval", "--model", str(deformable_detr), *common]) == 2
    assert "it knows 3 classes, but not circle, cross, ring" in capsys.readouterr().err


# Examples


@pytest.mark.parametrize(("script", "model"), [("loop", "deformable_detr"), ("trainer", "mask2former")])
def test_examples(script, model, data, tmp_path, monkeypatch, capsys, request):
    file = ROOT / "examples" / f"finetune_{script}.py"
    assert len(file.read_text().splitlines()) < 60
    folder = request.getfixturevalue(model)
    task = tasks.find_task(str(folder))
    start = tasks.load_model(task, str(folder), None, patched=False)
    start.save_pretrained(tmp_path / "start")
    tasks.load_processor(task, str(folder), SIZE).save_pretrained(tmp_path / "start")
    bare = _changed(data, tmp_path / "bare", lambda document: [a.pop("iscrowd") for a in document["annotations"]])
    paths = ("--model", tmp_path / "start", "--data", bare, "--out", tmp_path / "out")
    monkeypatch.setattr(sys, "argv", [str(file), *map(str, paths)])
    runpy.run_path(str(file), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.count("loss") >= STEPS_PER_EPOCH
    assert type(start).from_pretrained(tmp_path / "out").config.num_labels == 6
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
