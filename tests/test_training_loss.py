"""Matchers, losses and the mask predictor of transformers, batched against upstream's own loops."""

import copy
import dataclasses
import functools
import importlib
import inspect
import os
import pickle
import subprocess
import sys
from collections import Counter

import pytest
import torch
from helpers import assert_within_budget, free_port
from models import DETECTORS, LABELS, Detector, Tensors, anatomy, assert_as_accurate, reproducible, training_step
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import deformops_models as dm
from deformops_models import patching, set_prediction
from deformops_models.patching import PatchedModule

pytest.importorskip("transformers")
losses_module = importlib.import_module("deformops_models.patches.transformers_losses")

FLOAT32, BFLOAT16 = (torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16))
#: Everything but the attention, which has tests of its own.
PARTS = ("matcher", "loss", "mask_predictor")
TRAINED = [name for name in DETECTORS if name.startswith(("hf-mask2former", "hf-deformable-detr"))]
QUERIES = 6
#: Objects of each image: uneven, none in one image, none at all, more than queries.
COUNTS = [(3, 1), (2, 0, 4), (0, 2), (0, 0), (8, 2), (7, 9), (5,)]
_built: dict[str, nn.Module] = {}


def build(name: str) -> nn.Module:
    if name not in _built:
        _built[name] = DETECTORS[name].build()
    return copy.deepcopy(_built[name])


@pytest.fixture(params=TRAINED)
def detector(request) -> Detector:
    return DETECTORS[request.param]


@pytest.fixture
def criterion() -> nn.Module:
    return build("hf-mask2former").criterion


@pytest.fixture
def detr() -> nn.Module:
    return build("hf-deformable-detr-multi-scale")


def mask_problem(counts, layers=3, sizes=None, scale=3.0, queries=QUERIES) -> dict[str, object]:
    """Arguments of the Mask2Former loss, the same every time; `layers` - 1 of them are auxiliary."""
    random = torch.Generator().manual_seed(5)
    batch = len(counts)
    predictions = [
        {
            "masks_queries_logits": torch.randn(batch, queries, 12, 17, generator=random) * scale,
            "class_queries_logits": torch.randn(batch, queries, LABELS + 1, generator=random),
        }
        for _ in range(layers)
    ]
    sizes = sizes or [(40, 52)] * batch
    masks = [(torch.rand(n, *size, generator=random) > 0.5).float() for n, size in zip(counts, sizes, strict=True)]
    return {
        **predictions[0],
        "mask_labels": masks,
        "class_labels": [torch.randint(LABELS, (n,), generator=random) for n in counts],
        "auxiliary_predictions": predictions[1:] or None,
    }


def box_problem(counts, layers=3, queries=QUERIES) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """Class logits and boxes of all layers and the labels for Deformable DETR's loss."""
    random = torch.Generator().manual_seed(5)
    classes = torch.randn(layers, len(counts), queries, LABELS, generator=random)
    boxes = torch.rand(layers, len(counts), queries, 4, generator=random)
    labels = [
        {
            "class_labels": torch.randint(LABELS, (n,), generator=random),
            "boxes": torch.rand(n, 4, generator=random) * 0.5 + 0.2,
        }
        for n in counts
    ]
    return classes, boxes, labels


def convert(tree, dtype: torch.dtype, leaves: list[Tensor] | None = None):
    """A copy of nested arguments in another precision; `leaves` gets those that want gradients, in order."""
    if isinstance(tree, Tensor):
        tree = tree.to(dtype, copy=True) if tree.is_floating_point() else tree
        if leaves is not None and tree.is_floating_point():
            leaves.append(tree.requires_grad_())
        return tree
    if isinstance(tree, dict):
        return {k: convert(v, dtype, None if k in ("mask_labels", "boxes") else leaves) for k, v in tree.items()}
    return [convert(item, dtype, leaves) for item in tree] if isinstance(tree, (list, tuple)) else tree


def mask_step(criterion: nn.Module, problem, dtype=torch.float32, choices=None) -> tuple[Tensors, Tensors]:
    """Every loss and the gradient of every prediction."""
    leaves: list[Tensor] = []
    arguments = convert(problem, dtype, leaves)
    with reproducible(nn.Linear(1, 1, dtype=dtype), choices):
        losses = copy.deepcopy(criterion).to(dtype)(**arguments)
    return losses, dict(enumerate(torch.autograd.grad(sum(losses.values()), leaves)))


def box_step(model: nn.Module, problem, dtype=torch.float32) -> tuple[Tensors, Tensors]:
    classes, boxes, labels = convert(problem, dtype)
    leaves = [classes.requires_grad_(), boxes.requires_grad_()]
    with reproducible(nn.Linear(1, 1, dtype=dtype)):
        total, losses, auxiliary = model.loss_function(
            classes[-1], labels, classes.device, boxes[-1], model.config, classes, boxes
        )
    assert (auxiliary is not None) == model.config.auxiliary_loss
    if auxiliary is not None:
        assert len(auxiliary) == len(classes) - 1
        for i, layer in enumerate(auxiliary):
            assert torch.equal(layer["logits"], classes[i]) and torch.equal(layer["pred_boxes"], boxes[i])
    return {"total": total, **losses}, dict(enumerate(torch.autograd.grad(total, leaves)))


def within_budget(actual: tuple[Tensors, ...], plain: tuple[Tensors, ...], exact: tuple[Tensors, ...]) -> None:
    for ours, upstream, double in zip(actual, plain, exact, strict=True):
        assert list(ours) == list(upstream) == list(double)
        for name in ours:
            assert ours[name].dtype == upstream[name].dtype
            assert_within_budget(ours[name], double[name], upstream[name], str(name))


# Values


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("same_size", [True, False])
def test_mask2former_losses_and_gradients(criterion, counts, layers, same_size):
    sizes = None if same_size else [(40, 52), (31, 60), (50, 20)][: len(counts)]
    problem, choices = mask_problem(counts, layers, sizes), []
    exact = mask_step(criterion, problem, torch.float64, choices)
    plain = mask_step(criterion, problem, choices=choices)
    actual = mask_step(dm.patch(criterion, parts=PARTS), problem, choices=choices)
    assert len(actual[0]) == 3 * layers
    within_budget(actual, plain, exact)
    for name in actual[0]:
        if "cross_entropy" not in name:
            assert torch.equal(actual[0][name], plain[0][name]), name


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("auxiliary", [True, False])
def test_deformable_detr_losses_and_gradients(detr, counts, auxiliary):
    detr.config.auxiliary_loss = auxiliary
    problem = box_problem(counts, detr.config.decoder_layers)
    exact, plain = box_step(detr, problem, torch.float64), box_step(detr, problem)
    actual = box_step(dm.patch(detr, parts=PARTS), problem)
    assert len(actual[0]) == 1 + 4 * (detr.config.decoder_layers if auxiliary else 1)
    within_budget(actual, plain, exact)


def test_the_same_seed_gives_the_same_points_and_the_same_generator_afterwards(criterion):
    problem, results = mask_problem((3, 0, 2)), []
    for module in (criterion, dm.patch(copy.deepcopy(criterion), parts=PARTS)):
        torch.manual_seed(3)
        losses = module(**problem)
        results.append((losses["loss_mask_1"], losses["loss_dice"], torch.rand(3)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_points_may_be_drawn_by_an_override(criterion):
    problem = mask_problem((3, 1), layers=1)
    upstream = mask_step(criterion, problem)[0]
    patched = dm.patch(criterion, parts=PARTS)
    kept = []
    original = type(patched).draw_points

    def keep(self, pairs, device):
        kept.append(original(self, pairs, device))
        return kept[-1]

    mine = type("Mine", (type(patched),), {"draw_points": keep})
    patched.__class__ = mine
    assert torch.equal(mask_step_in_place(patched, problem)["loss_mask"], upstream["loss_mask"])
    mine.draw_points = lambda self, pairs, device: kept[0]
    # The matcher's draws differ now, the loss's do not.
    again = [mask_step_in_place(patched, problem)["loss_dice"] for _ in range(2)]
    assert torch.equal(again[0], upstream["loss_dice"]) and torch.equal(again[0], again[1])
    ((candidates, others),) = kept
    assert candidates.shape == (4, 180, 2) and others.shape == (4, 15, 2)


def mask_step_in_place(criterion: nn.Module, problem) -> Tensors:
    with reproducible(nn.Linear(1, 1)):
        return criterion(**problem)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_matcher_alone_finds_upstreams_pairs(criterion, counts):
    matcher, problem = criterion.matcher, mask_problem(counts, layers=1)
    del problem["auxiliary_predictions"]
    found = []
    for module in (matcher, dm.patch(copy.deepcopy(matcher), parts=("matcher",))):
        torch.manual_seed(1)
        found.append(module(**problem))
    assert_same_pairs(*found)
    assert [len(q) for q, _ in found[1]] == [min(n, QUERIES) for n in counts]


def assert_same_pairs(actual, expected) -> None:
    assert type(actual) is type(expected) is list and len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b) and (a.dtype, a.device) == (b.dtype, b.device)


def test_equal_costs_are_assigned_as_upstream_does(criterion, detr):
    problem = mask_problem((3, 2), layers=1, scale=0.0)
    problem["class_queries_logits"].zero_()
    del problem["auxiliary_predictions"]
    expected = criterion.matcher(**problem)
    assert_same_pairs(dm.patch(criterion, parts=PARTS).matcher(**problem), expected)

    upstream = importlib.import_module("transformers.loss.loss_deformable_detr").DeformableDetrHungarianMatcher()
    classes, boxes, labels = box_problem((3, 2), layers=1)
    classes.zero_(), boxes.fill_(0.5)
    expected = upstream({"logits": classes[0], "pred_boxes": boxes[0]}, labels)
    config = copy.copy(detr.config)
    config.class_cost = config.bbox_cost = config.giou_cost = 1
    labels = [[label[key] for label in labels] for key in ("class_labels", "boxes")]
    assert_same_pairs(losses_module._match_boxes(classes, boxes, *labels, config, ["a"])[0], expected)


@pytest.mark.parametrize("counts", [(30, 7), (60, 60), (3, 90)], ids=str)
def test_many_objects_are_matched_as_upstream_does(criterion, counts):
    problem = mask_problem(counts, layers=2, queries=60)
    recorded = []
    for module in (criterion, dm.patch(copy.deepcopy(criterion), parts=("matcher",))):
        pairs = []
        module.matcher.register_forward_hook(lambda m, args, output, pairs=pairs: pairs.append(output))
        torch.manual_seed(0)
        module(**problem)
        recorded.append(pairs)
    assert len(recorded[0]) == len(recorded[1]) == 2
    for expected, actual in zip(*recorded, strict=True):
        assert_same_pairs(actual, expected)


# Whole detectors


def test_patched_detectors_are_as_accurate_as_unpatched(detector):
    model, choices = build(detector.name), []
    exact = training_step(detector, copy.deepcopy(model).double(), choices=choices)
    plain = training_step(detector, model, choices=choices)
    actual = training_step(detector, dm.patch(model, parts=PARTS), choices=choices)
    for part in range(2):
        assert_as_accurate(actual[part], plain[part], exact[part], FLOAT32)
    for name in plain[0].keys() - {"['loss']"}:
        torch.testing.assert_close(actual[0][name], plain[0][name], rtol=2 * FLOAT32, atol=0)


@pytest.mark.parametrize("name", ["hf-mask2former", "hf-deformable-detr-refine"])
def test_bfloat16_autocast_step(name):
    detector, choices = DETECTORS[name], []
    model = build(name)
    exact = training_step(detector, copy.deepcopy(model).double(), choices=choices)
    plain = training_step(detector, model, torch.bfloat16, choices)
    actual = training_step(detector, dm.patch(model, parts=PARTS), torch.bfloat16, choices)
    for part in range(2):
        assert_as_accurate(actual[part], plain[part], exact[part], BFLOAT16)
    assert actual[0]["['loss']"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_and_matching_are_in_float32_under_autocast(criterion, detr, dtype):
    problem = convert(mask_problem((3, 1)), dtype)
    expected = mask_step_in_place(dm.patch(criterion, parts=PARTS), convert(problem, torch.float32))
    boxes = convert(box_problem((3, 1), 2), dtype)
    dm.patch(detr, parts=PARTS)
    with torch.autocast("cpu", dtype):
        actual = mask_step_in_place(criterion, problem)
        actual_boxes = box_step(detr, boxes)[0]
    for name, loss in box_step(detr, convert(boxes, torch.float32))[0].items():
        assert torch.equal(loss, actual_boxes[name])
    for name, loss in expected.items():
        assert loss.dtype == torch.float32 and torch.equal(loss, actual[name]), name


@pytest.mark.parametrize("name", ["hf-mask2former", "hf-deformable-detr-refine"])
def test_twenty_steps_from_one_seed(name):
    """Patched training leaves unpatched training by no more than one rounding of its weights does."""

    def train(model: nn.Module) -> tuple[Tensor, Tensor]:
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        torch.manual_seed(0)
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            losses.append(DETECTORS[name].call(model, True)["loss"])
            losses[-1].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return torch.stack(losses).detach(), torch.cat([p.detach().flatten() for p in model.parameters()])

    rounded = build(name)
    with torch.no_grad():
        for i, parameter in enumerate(rounded.parameters()):
            signs = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)).sign()
            parameter.mul_(1 + FLOAT32 / 2 * signs)
    plain, other, patched = map(train, (build(name), rounded, dm.patch(build(name), parts=PARTS)))
    assert plain[0][-1] < plain[0][0]
    band = (other[0] / plain[0] - 1).abs().max() + FLOAT32
    assert (patched[0] / plain[0] - 1).abs().max() <= 2 * band
    assert (patched[1] - plain[1]).norm() <= 2 * (other[1] - plain[1]).norm()


# Copies and memory


class HostCopies(TorchFunctionMode):
    """Counts what makes a GPU wait for the host: copies to it, and shapes that depend on values."""

    NAMES = ("cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "__array__")

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (name := getattr(func, "__name__", "")) in self.NAMES:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("counts", [(3, 1), (0, 2, 5), (0, 0)], ids=str)
def test_one_copy_to_the_host(criterion, detr, layers, counts):
    problem, boxes = mask_problem(counts, layers), box_problem(counts, layers)
    detr.config.decoder_layers = layers
    for module in (criterion, detr):
        dm.patch(module, parts=PARTS)
    # On a GPU nothing after the copy waits: the numbers read here lie on the host.
    with HostCopies() as copies:
        criterion(**problem)
    assert copies.counts["cpu"] == 1 and copies.counts["item"] == copies.counts["tolist"] == 0
    with HostCopies() as copies:
        detr.loss_function(boxes[0][-1], boxes[2], "cpu", boxes[1][-1], detr.config, *boxes[:2])
    assert copies.counts["cpu"] == 1 and copies.counts["item"] == copies.counts["tolist"] == 0


def test_upstream_copies_for_every_layer_and_image(criterion):
    with HostCopies() as copies:
        criterion(**mask_problem((3, 1), 4))
    assert copies.counts["cpu"] == 8


class Operators(TorchDispatchMode):
    """Counts calls of aten."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_less_than_a_third_of_upstreams_operators(criterion, detr):
    def operators(call, *arguments) -> int:
        with Operators() as operators:
            call(*arguments)
        return operators.count

    def masks(layers, images):
        criterion(**mask_problem((2,) * images, layers))

    def boxes(layers, images):
        classes, boxes, labels = box_problem((2,) * images, layers)
        detr.loss_function(classes[-1], labels, "cpu", boxes[-1], detr.config, classes, boxes)

    upstream = [operators(call, 10, 4) for call in (masks, boxes)]
    dm.patch(criterion, parts=PARTS)
    dm.patch(detr, parts=PARTS)
    for call, before in zip((masks, boxes), upstream, strict=True):
        assert 3 * operators(call, 10, 4) < before


@pytest.mark.parametrize("most", [1, 2000, 10**5])
def test_layers_are_taken_in_portions_that_fit(criterion, monkeypatch, most):
    problem = mask_problem((3, 1), 5)
    dm.patch(criterion, parts=PARTS)
    expected = mask_step(criterion, problem)
    monkeypatch.setattr(losses_module, "MOST_NUMBERS", most)
    sampled, sample = [], losses_module.sample
    monkeypatch.setattr(losses_module, "sample", lambda maps, at: sampled.append(at.numel()) or sample(maps, at))
    with HostCopies() as copies:
        actual = mask_step(criterion, problem)
    # One layer alone: 4 pairs with 180 candidates of 2 coordinates.
    per_portion = max(1, most // 1440)
    assert copies.counts["cpu"] == -(-5 // per_portion)
    assert max(sampled) <= max(most, 1440)
    for part in range(2):
        assert list(actual[part]) == list(expected[part])
        for name in actual[part]:
            torch.testing.assert_close(actual[part][name], expected[part][name], rtol=2 * FLOAT32, atol=FLOAT32)


def test_processes_meet_once_whatever_the_portions(criterion, monkeypatch):
    dm.patch(criterion, parts=PARTS)
    monkeypatch.setattr(losses_module, "MOST_NUMBERS", 1)
    calls, get_num_masks = [], type(criterion).get_num_masks
    monkeypatch.setattr(
        type(criterion), "get_num_masks", lambda *args, **kwargs: calls.append(1) or get_num_masks(*args, **kwargs)
    )
    mask_step(criterion, mask_problem((3, 1), 5))
    assert len(calls) == 1


# What is not finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("key", "name"), [("masks_queries_logits", "mask logits"), ("class_queries_logits", "class logits")]
)
@pytest.mark.parametrize("layer", [None, 1])
def test_predictions_that_are_not_finite_are_named(criterion, value, key, name, layer):
    problem = mask_problem((3, 1))
    of_layer = problem if layer is None else problem["auxiliary_predictions"][layer]
    of_layer[key].view(-1)[7] = value
    dm.patch(criterion, parts=PARTS)
    where = "the last layer" if layer is None else f"auxiliary layer {layer}"
    with pytest.raises(FloatingPointError, match=f"^{where}: {name} are not finite"):
        criterion(**problem)


def test_labels_that_are_not_finite_are_named(criterion):
    problem = mask_problem((3, 0, 1))
    problem["mask_labels"][2].fill_(torch.nan)
    dm.patch(criterion, parts=PARTS)
    with pytest.raises(FloatingPointError, match="^the last layer, image 2: matching costs are not finite"):
        criterion(**problem)


@pytest.mark.parametrize("case", ["classes", "boxes", "labels", "size"])
def test_boxes_that_are_not_finite_are_named(detr, case):
    classes, boxes, labels = box_problem((2, 3), 2)
    expected = {
        "classes": "auxiliary layer 0: class logits are",
        "boxes": "the last layer: boxes are",
        "labels": "the last layer, image 1: matching costs are",
        "size": "the last layer, image 1: matching costs are",
    }[case]
    if case == "classes":
        classes[0, 1, 2, 0] = torch.nan
    elif case == "boxes":
        boxes[1, 0, 2, 3] = torch.inf
    else:
        labels[1]["boxes"][2, 3] = torch.nan if case == "labels" else -0.1
    dm.patch(detr, parts=PARTS)
    with pytest.raises(FloatingPointError, match=f"^{expected} not finite"):
        detr.loss_function(classes[-1], labels, "cpu", boxes[-1], detr.config, classes, boxes)


def test_labels_that_do_not_fit_each_other_are_named(criterion, detr):
    problem = mask_problem((3, 1))
    dm.patch(criterion, parts=PARTS)
    masks, names = problem["mask_labels"], problem["class_labels"]
    with pytest.raises(ValueError, match="^image 1 has 1 class_labels and 3 mask_labels: give one of each per object"):
        criterion(**problem | {"mask_labels": [masks[0], masks[0]]})
    with pytest.raises(ValueError, match="^image 1 has 1 class_labels and 3 mask_labels"):
        criterion.matcher(problem["masks_queries_logits"], problem["class_queries_logits"], [masks[0]] * 2, names)
    with pytest.raises(ValueError, match="^class_labels and mask_labels are of 1 and 2 images, the predictions of 2: "):
        criterion(**problem | {"class_labels": names[:1]})
    classes, boxes, labels = box_problem((3, 1), 2)
    labels[1]["class_labels"] = labels[0]["class_labels"]
    dm.patch(detr, parts=PARTS)
    with pytest.raises(ValueError, match="^image 1 has 3 class_labels and 1 boxes: give one of each per object"):
        detr.loss_function(classes[-1], labels, "cpu", boxes[-1], detr.config, classes, boxes)


def test_padding_that_is_not_finite_is_no_error():
    costs = torch.zeros(1, 2, 3, 2)
    costs[0, 1, :, 1] = torch.nan
    (pairs,) = set_prediction.assign(costs, [2, 1], {"numbers": torch.zeros(1, 2)}, ["layer"])
    assert [len(q) for q, _ in pairs] == [2, 1]


# Parts, and what is left alone


@pytest.mark.parametrize("parts", [("matcher",), ("loss",), ("mask_predictor",), ("matcher", "loss"), PARTS])
def test_parts_can_be_left_out(parts):
    detector, model = DETECTORS["hf-mask2former"], build("hf-mask2former")
    choices = []
    expected = training_step(detector, model, choices=choices)[0]
    dm.patch(model, parts=parts)
    report = dm.report(model)
    assert {e.part for e in report.swapped} == set(parts) and len(report.swapped) == len(parts)
    assert {(e.part, e.reason) for e in report.skipped} == {
        (part, f"parts leave the {part} out") for part in dm.PARTS if part not in parts
    }
    assert {e.backend for e in report.swapped} == {"plain PyTorch"}
    for name, loss in training_step(detector, model, choices=choices)[0].items():
        torch.testing.assert_close(loss, expected[name], rtol=2 * FLOAT32, atol=0)


def test_patch_takes_all_parts_unless_told_otherwise(detector):
    model = dm.patch(build(detector.name))
    found = Counter(entry.part for entry in dm.report(model).swapped)
    others = dict.fromkeys(PARTS, 1) if detector.name == "hf-mask2former" else {"loss": 1}
    assert found == {"attention": detector.attentions, **others} and not dm.report(model).skipped
    with dm.patched(build(detector.name), parts=("loss",)) as model:
        assert [entry.part for entry in dm.report(model).swapped] == ["loss"]
    assert not dm.report(model).swapped


@pytest.mark.parametrize("parts", [("losses",), "loss", ("loss", "Matcher")])
def test_unknown_parts_are_an_error(criterion, parts):
    with pytest.raises(ValueError, match="give some of attention, matcher, loss, mask_predictor as a tuple"):
        dm.patch(criterion, parts=parts)
    assert not isinstance(criterion, PatchedModule)


def test_strict_asks_for_an_attention_if_attention_is_a_part(criterion):
    with pytest.raises(dm.PatchError, match="no deformable attention was patched in Mask2FormerLoss"):
        dm.patch(criterion)
    assert not isinstance(criterion, PatchedModule)
    dm.patch(criterion, strict=False)
    assert [entry.part for entry in dm.report(criterion).swapped] == ["loss", "matcher"]


def test_a_hooked_matcher_is_called_for_every_layer(criterion):
    problem, calls = mask_problem((3, 1)), []
    expected = mask_step(criterion, problem)[0]
    dm.patch(criterion, parts=PARTS)
    criterion.matcher.register_forward_hook(lambda module, args, output: calls.append(output))
    actual = mask_step_in_place(criterion, problem)
    assert len(calls) == 3
    for name, loss in actual.items():
        torch.testing.assert_close(loss, expected[name], rtol=2 * FLOAT32, atol=0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_method_of_ones_own_is_used(criterion, when):
    def loss_masks(masks, labels, indices, num_masks):
        return {"loss_mask": masks.mean() * num_masks, "loss_dice": masks.std()}

    if when == "before":
        criterion.loss_masks = loss_masks
    dm.patch(criterion, parts=PARTS)
    if when == "after":
        criterion.loss_masks = loss_masks
    problem = mask_problem((3, 1))
    actual = mask_step_in_place(criterion, problem)
    dm.unpatch(criterion)
    for name, loss in mask_step_in_place(criterion, problem).items():
        torch.testing.assert_close(actual[name], loss, rtol=2 * FLOAT32, atol=0)


def test_a_matcher_of_ones_own_is_used(criterion):
    class Matcher(nn.Module):
        def forward(self, masks, classes, mask_labels, class_labels):
            return [(torch.arange(len(labels)), torch.arange(len(labels))) for labels in class_labels]

    criterion.matcher = Matcher()
    problem = mask_problem((3, 1))
    expected = mask_step(criterion, problem)[0]
    for name, loss in mask_step(dm.patch(criterion, parts=PARTS), problem)[0].items():
        torch.testing.assert_close(loss, expected[name], rtol=2 * FLOAT32, atol=0)


@pytest.mark.parametrize("change", ["one pair less", "another image's pair"])
@pytest.mark.parametrize("way", ["subclass", "hook"])
def test_a_matcher_may_give_other_numbers_of_pairs(criterion, change, way):
    def changed(pairs):
        (queries, objects), (others, their_objects) = pairs
        if change == "another image's pair":
            free = min(set(range(QUERIES)) - set(others.tolist()))
            others, their_objects = torch.cat([others, torch.tensor([free])]), their_objects[[*range(3), 0]]
        return [(queries[1:], objects[1:]), (others, their_objects)]

    if way == "subclass":
        upstream = type(criterion.matcher)

        def forward(self, masks_queries_logits, class_queries_logits, mask_labels, class_labels):
            return changed(
                upstream.forward(self, masks_queries_logits, class_queries_logits, mask_labels, class_labels)
            )

        criterion.matcher.__class__ = type("Mine", (upstream,), {"forward": forward})
    else:
        criterion.matcher.register_forward_hook(lambda module, args, output: changed(output))
    problem = mask_problem((3, 3))
    expected = mask_step(criterion, problem)[0]
    actual = mask_step(dm.patch(criterion, parts=("loss",)), problem)[0]
    assert actual.keys() == expected.keys()
    for name, loss in actual.items():
        torch.testing.assert_close(loss, expected[name], rtol=2 * FLOAT32, atol=0)


def test_labels_may_be_one_tensor(criterion):
    problem = mask_problem((3, 3))
    stacked = problem | {name: torch.stack(problem[name]) for name in ("mask_labels", "class_labels")}
    expected = mask_step(criterion, stacked)[0]
    for name, loss in mask_step(dm.patch(criterion, parts=PARTS), stacked)[0].items():
        torch.testing.assert_close(loss, expected[name], rtol=2 * FLOAT32, atol=0)


def test_steps_that_the_batched_loss_would_pass_over_are_respected(criterion):
    upstream = type(criterion)
    criterion.__class__ = type("Mine", (upstream,), {"loss_masks": lambda self, *args: {}})
    dm.patch(criterion, strict=False)
    (entry,) = dm.report(criterion).skipped
    assert entry.reason == "it has methods of its own or lacks them: loss_masks"
    criterion.__class__ = upstream
    criterion.loss_labels = lambda *args: {}
    dm.patch(criterion, strict=False)
    assert dm.report(criterion).skipped[0].reason == "replaced on the instance: loss_labels"
    del criterion.loss_labels
    # Steps that are still called may be overridden.
    problem = mask_problem((3, 1))
    criterion.__class__ = type("Mine", (upstream,), {"calculate_uncertainty": lambda self, logits: logits})
    expected = mask_step(criterion, problem)[0]
    actual = mask_step(dm.patch(criterion, parts=PARTS), problem)[0]
    assert torch.equal(actual["loss_mask"], expected["loss_mask"])
    assert type(criterion).__name__ == "PatchedMine"


def test_a_loss_with_another_forward_is_reported(criterion):
    criterion.__class__ = type("Mine", (type(criterion),), {"forward": lambda self, *args, **kwargs: "mine"})
    dm.patch(criterion, parts=PARTS)
    assert criterion() == "mine"
    entries = {e.name: e.reason for e in dm.report(criterion).skipped}
    assert entries[""].startswith(f"class {__name__}.Mine has another forward than transformers.models.")
    assert {e.part for e in dm.report(criterion).skipped} == {"loss"}


def test_unknown_signatures_are_left_alone(criterion, detr, monkeypatch):
    rows = {
        key: dataclasses.replace(family, parameters=(*family.parameters, "new"))
        for key, family in patching._families_by_class().items()
    }
    with monkeypatch.context() as patch:
        patch.setattr(patching, "_families_by_class", lambda: rows)
        for model in (criterion, detr):
            dm.patch(model, strict=False)
            assert not dm.report(model).swapped
            assert {"unknown signature" in entry.reason for entry in dm.report(model).skipped} == {True}

    def another(logits, labels, new):
        raise AssertionError

    family = patching.family_of(type(detr))
    monkeypatch.setitem(family._mapping(), type(detr).__name__, another)
    dm.patch(detr)
    reasons = {entry.part: entry.reason for entry in dm.report(detr).skipped}
    assert reasons["loss"].startswith("unknown signature: another(logits, labels, new), known is (logits, labels, dev")


def test_a_loss_in_transformers_mapping_that_is_not_its_own_is_left_alone(detr, monkeypatch):
    mapping = patching.family_of(type(detr))._mapping()
    upstream = mapping[type(detr).__name__]

    @functools.wraps(upstream)
    def doubled(*args, **named):
        loss, *rest = upstream(*args, **named)
        return 2 * loss, *rest

    monkeypatch.setitem(mapping, type(detr).__name__, doubled)
    dm.patch(detr)
    (entry,) = dm.report(detr).skipped
    assert entry.reason == f"transformers' LOSS_MAPPING has a loss of {__name__}"


def test_a_loss_function_that_is_not_upstreams_is_left_alone(detr):
    def mine(*args):
        raise AssertionError

    detr.loss_function = mine
    dm.patch(detr)
    (entry,) = dm.report(detr).skipped
    assert (entry.name, entry.reason) == ("", "its loss_function was replaced on the instance")
    assert dm.unpatch(detr).loss_function is mine
    del detr._loss_function
    detr.loss_type = "ForObjectDetection"
    dm.patch(detr)
    assert dm.report(detr).skipped[0].reason == "its loss_type is ForObjectDetection"


@pytest.mark.parametrize("kind", [lambda mine: mine, property], ids=["method", "property"])
def test_a_loss_function_of_a_subclass_is_left_alone(detr, kind):
    def mine(self, *args):
        return "mine"

    detr.__class__ = type("Mine", (type(detr),), {"loss_function": kind(mine)})
    before = detr.loss_function
    dm.patch(detr)
    (entry,) = dm.report(detr).skipped
    assert (entry.name, entry.reason) == ("", "it has methods of its own or lacks them: loss_function")
    assert detr.loss_function == before
    assert vars(dm.unpatch(detr)).keys().isdisjoint({"loss_function", "_loss_function"})


# The swap


def test_nothing_is_left_after_unpatching(detector):
    model = build(detector.name)
    before, step = anatomy(model), training_step(detector, model)
    state = list(model.state_dict())
    dm.patch(model, parts=PARTS)
    assert list(model.state_dict()) == state and [id(m) for m in model.modules()] == [
        before[n][0] for n in names(model)
    ]
    training_step(detector, model)
    dm.unpatch(model)
    assert anatomy(model) == before
    for actual, expected in zip(training_step(detector, model), step, strict=True):
        assert actual.keys() == expected.keys() and all(torch.equal(actual[n], expected[n]) for n in actual)


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules()]


def test_a_failed_swap_gives_a_loss_function_back(detr):
    attention = detr.model.encoder.layers[0].self_attn

    def refuse(self, name, value):
        if name == "__class__":
            raise RuntimeError("frozen")
        object.__setattr__(self, name, value)

    attention.__class__ = type("Frozen", (type(attention),), {"__setattr__": refuse})
    before = anatomy(detr)
    with pytest.raises(dm.PatchError, match="takes no patched class: frozen"):
        dm.patch(detr)
    assert anatomy(detr) == before


def test_copies_stay_patched(detector):
    model = dm.patch(build(detector.name), parts=PARTS)
    copied, swapped = copy.deepcopy(model), dm.report(model).swapped
    assert dm.report(copied).swapped == swapped
    expected = training_step(detector, model)
    for actual, wanted in zip(training_step(detector, copied), expected, strict=True):
        assert all(torch.equal(actual[name], wanted[name]) for name in wanted)
    dm.unpatch(copied)
    assert not dm.report(copied).swapped and dm.report(model).swapped == swapped


def test_pickles_stay_patched(criterion, detr, tmp_path):
    # A whole Mask2Former cannot be pickled, patched or not: its backbone's hooks are local functions.
    predictor, arguments = predictor_problem()
    cases = [
        (criterion, lambda m: mask_step(m, mask_problem((3, 1)))[0]),
        (predictor, lambda m: dict(enumerate(m(*arguments)))),
        (detr, lambda m: box_step(m, box_problem((3, 1)))[0]),
    ]
    for model, call in cases:
        dm.patch(model, parts=PARTS)
        expected = call(model)
        torch.save(model, tmp_path / "model.pt")
        for copied in (
            pickle.loads(pickle.dumps(model)),
            torch.load(tmp_path / "model.pt", weights_only=False),
        ):
            assert dm.report(copied).swapped == dm.report(model).swapped
            assert all(torch.equal(value, expected[name]) for name, value in call(copied).items())
            assert not dm.report(dm.unpatch(copied)).swapped


def test_saved_checkpoints_are_upstreams(detector, tmp_path):
    model = build(detector.name)
    model.save_pretrained(tmp_path / "before")
    dm.patch(model).save_pretrained(tmp_path / "after")
    files = sorted(path.name for path in (tmp_path / "before").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "after").iterdir())
    for name in files:
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()


def test_hooks_on_the_loss_see_one_call(criterion):
    problem, calls = mask_problem((3, 1)), []
    criterion.register_forward_pre_hook(lambda module, args, kwargs: calls.append(sorted(kwargs)), with_kwargs=True)
    criterion.register_forward_hook(lambda module, args, output: {**output, "mine": torch.zeros(())})
    dm.patch(criterion, parts=PARTS)
    assert "mine" in criterion(**problem) and calls == [sorted(problem)]


def test_no_global_of_transformers_is_rebound(detector):
    modules = [m for n, m in sys.modules.items() if n.startswith("transformers.") and ("loss" in n or "former" in n)]
    modules += [sys.modules["transformers.modeling_utils"]]
    before = [dict(vars(module)) for module in modules]
    mapping = dict(sys.modules["transformers.loss.loss_utils"].LOSS_MAPPING)
    model = dm.patch(build(detector.name))
    training_step(detector, model)
    assert mapping == sys.modules["transformers.loss.loss_utils"].LOSS_MAPPING
    for module, entries in zip(modules, before, strict=True):
        assert all(vars(module)[name] is value for name, value in entries.items())


def test_signatures_are_upstreams(detr):
    model = build("hf-mask2former")
    before = {name: inspect.signature(type(m).forward) for name, m in model.named_modules()}
    dm.patch(model)
    for entry in dm.report(model).swapped:
        after = inspect.signature(type(model.get_submodule(entry.name)).forward)
        for a, b in zip(after.parameters.values(), before[entry.name].parameters.values(), strict=True):
            assert (a.name, a.kind, a.default) == (b.name, b.kind, b.default)
    upstream = inspect.signature(detr.loss_function)
    ours = inspect.signature(dm.patch(detr).loss_function)
    for a, b in zip(ours.parameters.values(), upstream.parameters.values(), strict=True):
        assert (a.name, a.kind, a.default) == (b.name, b.kind, b.default)


# The mask predictor


def predictor_problem(queries=QUERIES) -> tuple[nn.Module, tuple[Tensor, Tensor, tuple[int, int]]]:
    predictor = build("hf-mask2former").model.transformer_module.decoder.mask_predictor
    random = torch.Generator().manual_seed(2)
    arguments = torch.randn(queries, 2, 32, generator=random), torch.randn(2, 32, 10, 14, generator=random), (5, 7)
    return predictor, arguments


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_mask_predictor_gives_the_same_numbers(autocast):
    predictor, (outputs, embeddings, size) = predictor_problem()
    results = []
    for module in (predictor, dm.patch(copy.deepcopy(predictor), parts=PARTS)):
        inputs = [t.clone().requires_grad_() for t in (outputs, embeddings)]
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            masks, hidden = module(*inputs, size)
        gradients = torch.autograd.grad(masks.square().sum(), [*inputs, *module.parameters()])
        assert not hidden.requires_grad
        results.append((masks, hidden, *gradients))
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


def test_mask_predictor_is_exported_without_einsum():
    predictor, arguments = predictor_problem()
    expected = predictor(*arguments)

    class Sized(nn.Module):
        def __init__(self, predictor):
            super().__init__()
            self.predictor = predictor

        def forward(self, outputs, embeddings):
            return self.predictor(outputs, embeddings, arguments[2])

    def einsums(model):
        return str(torch.jit.trace(Sized(model), arguments[:2]).inlined_graph).count("aten::einsum")

    assert einsums(predictor) == 1
    dm.patch(predictor, parts=PARTS)
    assert einsums(predictor) == 0
    dims = torch.export.Dim.DYNAMIC
    shapes = {0: dims}, {2: dims, 3: dims}, (None, None)
    program = torch.export.export(predictor, arguments, dynamic_shapes=shapes, strict=False).module()
    for actual, wanted in zip(program(*arguments), expected, strict=True):
        assert torch.equal(actual, wanted)
    other = predictor_problem(4)[1][0], torch.randn(2, 32, 8, 20), arguments[2]
    for actual, wanted in zip(program(*other), predictor(*other), strict=True):
        assert torch.equal(actual, wanted)


# Several processes


def test_objects_are_averaged_over_processes():
    pytest.importorskip("accelerate")
    script = """
import os, sys, torch
sys.path.insert(0, os.environ["TESTS"])
from accelerate import PartialState
import deformops_models as dm
from test_training_loss import PARTS, box_problem, box_step, build, mask_problem, mask_step
state = PartialState(cpu=True)
assert state.num_processes == 2, state
counts = (3, 1) if state.process_index else (0, 2)
criterion, detr = build("hf-mask2former").criterion, build("hf-deformable-detr-multi-scale")
masks, boxes = mask_problem(counts), box_problem(counts, 2)
expected = mask_step(criterion, masks)[0], box_step(detr, boxes)[0]
actual = mask_step(dm.patch(criterion, parts=PARTS), masks)[0], box_step(dm.patch(detr, parts=PARTS), boxes)[0]
for ours, theirs in zip(actual, expected):
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=2.4e-7, atol=0)
# Upstream divides the mean over processes by their number once more.
number = criterion.get_num_masks(masks["class_labels"], device="cpu")
assert number == 1.5, number
state.wait_for_everyone()
state.destroy_process_group()
# A thread of gloo may outlive its group, and C++ aborts a process that ends before it: that is not tested here.
os._exit(0)
"""
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), os.path.dirname(here), here])
    shared = os.environ | {"PYTHONPATH": path, "TESTS": here, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"ACCELERATE_USE_CPU": "1", "HF_HUB_OFFLINE": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script], env=shared | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
