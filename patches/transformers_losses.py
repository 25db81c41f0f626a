"""The rest of a training step in Hugging Face transformers: matchers, losses and the mask predictor.

Upstream goes through decoder layers and images one by one. Here they are computed together, in float32 whatever the
autocast around, and with the points that upstream would draw from the same seed.
"""

import importlib
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from deformops_models import patching
from deformops_models.patching import Family, PatchedModule
from deformops_models.set_prediction import (
    Pairs,
    assign,
    flat_indices,
    focal_costs,
    focal_losses,
    generalized_iou,
    mask_costs,
    mask_losses,
    sample,
    select_classes,
    upcast,
    upload,
)

#: Layers are taken together while their largest tensor, of sampled points, has at most so many numbers (512 MiB).
MOST_NUMBERS = 2**27


def _float32(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)


def _layer_name(suffix: str) -> str:
    return f"auxiliary layer {suffix[1:]}" if suffix else "the last layer"


class _HungarianMatcher(PatchedModule):
    @torch.no_grad()
    def forward(self, masks_queries_logits, class_queries_logits, mask_labels, class_labels):
        mask_labels, class_labels = list(mask_labels), list(class_labels)
        _check_labels("class_labels", class_labels, "mask_labels", mask_labels, len(masks_queries_logits))
        points = self.draw_points(masks_queries_logits)
        predictions = [(masks_queries_logits, class_queries_logits)]
        return self.match(predictions, mask_labels, class_labels, [points], ["the predictions"])[0]

    def draw_points(self, masks: Tensor) -> Tensor:
        """Points (B, P, 2) for one layer's `masks` (B, Q, H, W)."""
        return torch.cat([torch.rand(1, self.num_points, 2, device=masks.device) for _ in range(len(masks))])

    @torch.no_grad()
    def match(
        self,
        predictions: list[tuple[Tensor, Tensor]],
        mask_labels: list[Tensor],
        class_labels: list[Tensor],
        points: list[Tensor],
        layers: list[str],
    ) -> list[list[Pairs]]:
        """Matches all layers.

        Args:
            predictions: of each layer, masks (B, Q, H, W) and class logits (B, Q, C + 1).
            mask_labels, class_labels: of each image, (objects, H, W) and (objects,).
            points: of each layer, as from `draw_points`.
            layers: their names for errors.
        """
        masks = [mask for mask, _ in predictions]
        with _float32(masks[0]):
            classes = upcast(torch.stack([logits for _, logits in predictions]))
            size = max(1, MOST_NUMBERS // (masks[0].shape[0] * masks[0].shape[1] * self.num_points))
            costs = [
                self._costs(masks[i : i + size], classes[i : i + size], mask_labels, class_labels, points[i : i + size])
                for i in range(0, len(masks), size)
            ]
            checks = {
                "mask logits": torch.stack([torch.stack(mask.aminmax()) for mask in masks]),
                "class logits": torch.stack(classes.flatten(1).aminmax(dim=1), 1),
            }
            return assign(torch.cat(costs), [len(labels) for labels in class_labels], checks, layers)

    def _costs(self, masks, classes, mask_labels, class_labels, points) -> Tensor:
        """(L, B, Q, N) of some layers; columns without an object are padding."""
        points = torch.stack(points)
        logits = torch.stack([sample(upcast(mask), at) for mask, at in zip(masks, points, strict=True)])
        targets = []
        for labels, at in zip(mask_labels, points.unbind(1), strict=True):
            values = sample(labels[None].to(logits), at.reshape(1, -1, 2))
            targets.append(values[0].unflatten(1, at.shape[:2]))
        targets = pad_sequence(targets, batch_first=True).permute(2, 0, 1, 3)
        cross_entropy, dice = mask_costs(logits, targets)
        classes = -select_classes(classes.softmax(-1), pad_sequence(class_labels, batch_first=True))
        return self.cost_mask * cross_entropy + self.cost_class * classes + self.cost_dice * dice


#: Methods of upstream's loss that the patched one does without.
_LOSS_STEPS = ("loss_labels", "loss_masks", "sample_points_using_uncertainty", "_pad_images_to_max_in_batch")


class _Mask2FormerLoss(PatchedModule):
    def forward(
        self, masks_queries_logits, class_queries_logits, mask_labels, class_labels, auxiliary_predictions=None
    ):
        # Someone may have given this instance other methods, or another matcher, since it was patched.
        if not vars(self).keys().isdisjoint(_LOSS_STEPS) or not _matches_one_to_one(self.matcher):
            return super().forward(
                masks_queries_logits, class_queries_logits, mask_labels, class_labels, auxiliary_predictions
            )
        mask_labels, class_labels = list(mask_labels), list(class_labels)
        _check_labels("class_labels", class_labels, "mask_labels", mask_labels, len(masks_queries_logits))
        predictions = [(masks_queries_logits, class_queries_logits)]
        for layer in auxiliary_predictions or ():
            predictions.append((layer["masks_queries_logits"], layer["class_queries_logits"]))
        suffixes = ["", *(f"_{i}" for i in range(len(predictions) - 1))]
        queries = masks_queries_logits.shape[1]
        pairs = sum(min(len(labels), queries) for labels in class_labels)
        size = max(1, MOST_NUMBERS // max(1, 2 * pairs * int(self.num_points * self.oversample_ratio)))
        # Processes meet in here, which may have different numbers of portions.
        num_masks = self.get_num_masks(class_labels, device=class_labels[0].device)
        losses = {}
        for i in range(0, len(predictions), size):
            layers = slice(i, i + size)
            losses |= self._losses(predictions[layers], suffixes[layers], mask_labels, class_labels, pairs, num_masks)
        return losses

    def draw_points(self, pairs: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """For each of one layer's pairs, points to choose the most uncertain of, and those taken in any case."""
        chosen = int(self.importance_sample_ratio * self.num_points)
        candidates = torch.rand(pairs, int(self.num_points * self.oversample_ratio), 2, device=device)
        return candidates, torch.rand(pairs, self.num_points - chosen, 2, device=device)

    def _losses(self, predictions, suffixes, mask_labels, class_labels, pairs: int, num_masks) -> dict[str, Tensor]:
        device = predictions[0][0].device
        together = isinstance(self.matcher, _HungarianMatcher)
        matcher_points, points, matches = [], [], []
        # In upstream's order: the same seed gives the same points.
        for masks, classes in predictions:
            if together:
                matcher_points.append(self.matcher.draw_points(masks))
            else:
                matches.append(self.matcher(masks, classes, mask_labels, class_labels))
            points.append(self.draw_points(pairs, device))
        if together:
            layers = [_layer_name(suffix) for suffix in suffixes]
            matches = self.matcher.match(predictions, mask_labels, class_labels, matcher_points, layers)
        with _float32(predictions[0][0]):
            counts = [len(labels) for labels in class_labels]
            indices = flat_indices(matches, predictions[0][0].shape[1], counts)
            queries, objects, *crossings = upload([*indices, *_crossings(indices[1], sum(counts))], device)
            masks = [mask for mask, _ in predictions]
            cross_entropy, dice = self._mask_losses(masks, mask_labels, points, queries, crossings)
            classes = torch.stack([logits for _, logits in predictions])
            labels = self._label_losses(upcast(classes), class_labels, queries, objects)
            # Separate tensors rather than views of one, as the model weights each in place.
            parts = zip(suffixes, cross_entropy.unbind(), dice.unbind(), labels, strict=True)
            result = {}
            for suffix, loss_mask, loss_dice, loss_cross_entropy in parts:
                result[f"loss_mask{suffix}"] = loss_mask / num_masks
                result[f"loss_dice{suffix}"] = loss_dice / num_masks
                result[f"loss_cross_entropy{suffix}"] = loss_cross_entropy
            return result

    def _mask_losses(self, masks, mask_labels, points, queries, crossings) -> tuple[Tensor, Tensor]:
        """Sums of cross-entropy and dice over each layer's pairs, (L,) each."""
        rows = [mask.flatten(0, 1).index_select(0, index) for mask, index in zip(masks, queries, strict=True)]
        predicted = upcast(torch.cat(rows))[:, None]
        with torch.no_grad():
            points = self._choose_points(predicted, *map(torch.cat, zip(*points, strict=True)))
            targets = _sample_objects(_padded(mask_labels).to(predicted), points, *crossings)
        losses = mask_losses(sample(predicted, points)[:, 0], targets)
        return tuple(loss.view(queries.shape).sum(1) for loss in losses)

    def _choose_points(self, masks: Tensor, candidates: Tensor, others: Tensor) -> Tensor:
        """Of `masks` (L·K, 1, H, W) the most uncertain points among the candidates, and the others, (L·K, P, 2)."""
        uncertainty = self.calculate_uncertainty(sample(masks, candidates))[:, 0]
        chosen = uncertainty.topk(self.num_points - others.shape[1], dim=1).indices
        return torch.cat([candidates.gather(1, chosen[..., None].expand(-1, -1, 2)), others], 1)

    def _label_losses(self, logits: Tensor, class_labels, queries: Tensor, objects: Tensor) -> list[Tensor]:
        """Weighted mean cross-entropy of each layer of `logits` (L, B, Q, C + 1)."""
        targets = torch.full(logits.shape[:3], self.num_labels, device=logits.device).flatten(1)
        targets = targets.scatter(1, queries, torch.cat(class_labels)[objects])
        weight = self.empty_weight.to(logits.dtype)
        log_scores = logits.transpose(2, 3).log_softmax(2)
        targets = targets.view(logits.shape[:3])
        return [F.nll_loss(*layer, weight) for layer in zip(log_scores.unbind(), targets.unbind(), strict=True)]


def _matches_one_to_one(matcher: nn.Module) -> bool:
    """Whether a matcher is upstream's, patched or not, and nobody waits for its calls or may change their result."""
    family = patching.family_of(type(matcher))
    hooks = matcher._forward_pre_hooks or matcher._forward_hooks
    return family is not None and family.part == "matcher" and "forward" not in vars(matcher) and not hooks


def _padded(mask_labels: list[Tensor]) -> Tensor:
    """Masks of all images (T, 1, H, W), with zeros to the right and below up to the largest size."""
    height, width = (max(labels.shape[axis] for labels in mask_labels) for axis in (1, 2))
    padded = [
        labels if labels.shape[1:] == (height, width)
        else F.pad(labels, (0, width - labels.shape[2], 0, height - labels.shape[1]))
        for labels in mask_labels
    ]  # fmt: skip
    return torch.cat(padded)[:, None]


def _crossings(objects: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Where each object (T, L) has its points among the L·K pairs, and each pair (L, K) its values among the T·L.

    An object without a pair in a layer, as there are more objects than queries, gets some other's points.
    """
    layers, pairs = objects.shape
    numbers = torch.arange(layers * pairs).view(layers, pairs)
    of_object = torch.zeros(layers, total, dtype=torch.int64).scatter(1, objects, numbers)
    return of_object.T, objects * layers + torch.arange(layers)[:, None]


def _sample_objects(masks: Tensor, points: Tensor, of_object: Tensor, of_pair: Tensor) -> Tensor:
    """Values (L·K, P) of each pair's object in `masks` (T, 1, H, W) at the pair's `points` (L·K, P, 2).

    Every mask is read in its place for all layers: a copy for each pair would take L times the memory.
    """
    by_object = points[of_object].flatten(1, 2)
    values = sample(masks, by_object).view(of_object.numel(), points.shape[1])
    return values[of_pair.flatten()]


class _MaskPredictor(PatchedModule):
    def forward(self, outputs, pixel_embeddings, attention_mask_target_size=None):
        # A plain matrix product, which every exporter knows.
        masks = self.mask_embedder(outputs.transpose(0, 1)) @ pixel_embeddings.flatten(2)
        masks = masks.unflatten(2, pixel_embeddings.shape[2:])
        resized = F.interpolate(masks.detach(), size=attention_mask_target_size, mode="bilinear", align_corners=False)
        hidden = resized.sigmoid().flatten(2) < 0.5
        return masks, hidden[:, None].expand(-1, self.num_heads, -1, -1).flatten(0, 1)


def deformable_detr_loss(
    logits, labels, device, pred_boxes, config, outputs_class=None, outputs_coord=None, **kwargs
) -> tuple[Tensor, dict[str, Tensor], list[dict[str, Tensor]] | None]:
    """Deformable DETR's matching and losses in place of upstream's `loss_function`, whose arguments it has.

    Args:
        logits: (B, Q, C), of the last layer.
        labels: of each image, "class_labels" (objects,) and "boxes" (objects, 4) as relative cx, cy, w, h.
        device: unused; the tensors say it.
        pred_boxes: (B, Q, 4), of the last layer.
        config: of the model.
        outputs_class, outputs_coord: (L, B, Q, C) and (L, B, Q, 4), of all layers.

    Returns:
        The total, its parts by name, and the auxiliary predictions.
    """
    auxiliary, predictions = None, [(logits, pred_boxes)]
    if config.auxiliary_loss:
        earlier = list(zip(outputs_class[:-1], outputs_coord[:-1], strict=True))
        predictions += earlier
        auxiliary = [{"logits": classes, "pred_boxes": boxes} for classes, boxes in earlier]
    suffixes = ["", *(f"_{i}" for i in range(len(predictions) - 1))]
    with _float32(logits):
        classes, boxes = (upcast(torch.stack(tensors)) for tensors in zip(*predictions, strict=True))
        names = [_layer_name(suffix) for suffix in suffixes]
        losses = _box_losses(classes, boxes, labels, config, names)
        weights = {"loss_ce": 1, "loss_bbox": config.bbox_loss_coefficient, "loss_giou": config.giou_loss_coefficient}
        total = sum(losses[name][: config.decoder_layers] * weight for name, weight in weights.items()).sum()
    return total, {f"{name}{s}": loss[i] for i, s in enumerate(suffixes) for name, loss in losses.items()}, auxiliary


def _box_losses(classes: Tensor, boxes: Tensor, labels: list[dict], config, layers: list[str]) -> dict[str, Tensor]:
    """Losses (L,) by name, of class logits (L, B, Q, C) and boxes (L, B, Q, 4)."""
    object_classes = [label["class_labels"] for label in labels]
    object_boxes = [label["boxes"].reshape(-1, 4).to(boxes) for label in labels]
    counts = [len(label) for label in object_boxes]
    _check_labels("class_labels", object_classes, "boxes", object_boxes, classes.shape[1])
    pairs = _match_boxes(classes.detach(), boxes.detach(), object_classes, object_boxes, config, layers)
    indices = [*flat_indices(pairs, classes.shape[2], counts), torch.tensor(counts)]
    queries, objects, lengths = upload(indices, classes.device)
    number = _mean_over_processes(sum(counts), classes.device)

    targets = torch.full(classes.shape[:3], config.num_labels, device=classes.device).flatten(1)
    targets = targets.scatter(1, queries, torch.cat(object_classes)[objects]).view(classes.shape[:3])
    one_hot = classes.new_zeros(*classes.shape[:3], classes.shape[3] + 1).scatter_(3, targets[..., None], 1)[..., :-1]
    focal = focal_losses(classes, one_hot, config.focal_alpha).mean(2).sum((1, 2))
    found = boxes.flatten(1, 2).gather(1, queries[..., None].expand(-1, -1, 4))
    wanted = torch.cat(object_boxes)[objects]
    seen = (classes.detach().sigmoid().amax(3) > 0.5).sum(2)
    return {
        "loss_ce": focal / number * classes.shape[2],
        "loss_bbox": (found - wanted).abs().sum((1, 2)) / number,
        "loss_giou": (1 - generalized_iou(found, wanted)).sum(1) / number,
        "cardinality_error": (seen - lengths).abs().to(torch.float32).mean(1),
    }


def _match_boxes(classes, boxes, object_classes, object_boxes, config, layers) -> list[list[Pairs]]:
    wanted = pad_sequence(object_boxes, batch_first=True)
    costs = (
        config.bbox_cost * torch.cdist(boxes, wanted, p=1)
        + config.class_cost * focal_costs(classes, pad_sequence(object_classes, batch_first=True))
        - config.giou_cost * generalized_iou(boxes[:, :, :, None], wanted[:, None])
    )
    checks = {"class logits": classes, "boxes": boxes}
    checks = {name: torch.stack(t.flatten(1).aminmax(dim=1), 1) for name, t in checks.items()}
    return assign(costs, [len(b) for b in object_boxes], checks, layers)


def _check_labels(name: str, labels: list[Tensor], other: str, others: list[Tensor], images: int) -> None:
    if not len(labels) == len(others) == images:
        raise ValueError(
            f"{name} and {other} are of {len(labels)} and {len(others)} images, the predictions of {images}: give both "
            "for each image, empty ones for an image without objects"
        )
    for image, (one, two) in enumerate(zip(labels, others, strict=True)):
        if len(one) != len(two):
            raise ValueError(f"image {image} has {len(one)} {name} and {len(two)} {other}: give one of each per object")


def _mean_over_processes(count: int, device: torch.device) -> Tensor | float:
    """Objects per process, at least one."""
    from transformers.utils import is_accelerate_available

    if is_accelerate_available():
        from accelerate import PartialState
        from accelerate.utils import reduce

        if PartialState._shared_state:
            total = reduce(torch.full((), count, dtype=torch.float32, device=device))
            return (total / PartialState().num_processes).clamp(min=1)
    return float(max(count, 1))


class _LossFunction(Family):
    """A loss that is no module: transformers lets each model instance have a `loss_function` of its own."""

    def mismatch(self, cls: type[nn.Module]) -> str | None:
        upstream = self._mapping()[self.class_name]
        found, known = (tuple(inspect.signature(function).parameters) for function in (upstream, self.adapter))
        if found != known:
            return f"unknown signature: {upstream.__name__}({', '.join(found)}), known is ({', '.join(known)})"
        if strange := patching.foreign_code(upstream, "transformers"):
            return f"transformers' LOSS_MAPPING has a loss of {strange}"
        return super().mismatch(cls)

    def is_patched(self, module: nn.Module) -> bool:
        return vars(module).get("_loss_function") is self.adapter

    def obstacle(self, module: nn.Module) -> str | None:
        if self.is_patched(module):
            return None
        if "_loss_function" in vars(module):
            return "its loss_function was replaced on the instance"
        if module.loss_type != self.class_name:
            return f"its loss_type is {module.loss_type}"
        return self.mismatch(type(module))

    def swap(self, module: nn.Module) -> None:
        module.loss_function = self.adapter

    def hold(self, module: nn.Module) -> None:
        return None

    def restore(self, module: nn.Module) -> None:
        del module._loss_function

    def _mapping(self) -> dict[str, Callable]:
        return importlib.import_module("transformers.loss.loss_utils").LOSS_MAPPING


_MASK2FORMER = ("mask2former", "transformers", "transformers.models.mask2former.modeling_mask2former")
_PREDICTIONS = ("masks_queries_logits", "class_queries_logits", "mask_labels", "class_labels")

FAMILIES = (
    Family(*_MASK2FORMER, "Mask2FormerHungarianMatcher", _HungarianMatcher, _PREDICTIONS, "matcher"),
    Family(
        *_MASK2FORMER,
        "Mask2FormerLoss",
        _Mask2FormerLoss,
        (*_PREDICTIONS, "auxiliary_predictions"),
        "loss",
        _LOSS_STEPS,
    ),
    Family(
        *_MASK2FORMER,
        "Mask2FormerMaskPredictor",
        _MaskPredictor,
        ("outputs", "pixel_embeddings", "attention_mask_target_size"),
        "mask_predictor",
    ),
    _LossFunction(
        "deformable_detr",
        "transformers",
        "transformers.models.deformable_detr.modeling_deformable_detr",
        "DeformableDetrForObjectDetection",
        deformable_detr_loss,
        (
            "pixel_values",
            "pixel_mask",
            "decoder_attention_mask",
            "encoder_outputs",
            "inputs_embeds",
            "decoder_inputs_embeds",
            "labels",
            "kwargs",
        ),
        "loss",
        ("loss_function",),
    ),
)


def __getattr__(name: str):
    return patching.importable(tuple(f for f in FAMILIES if type(f) is Family), __name__, name)
