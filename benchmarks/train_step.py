"""One bf16 training step of three real detectors, patched against unpatched, on one GPU.

    python benchmarks/train_step.py --out benchmarks/results/train_step.csv

Random weights and images. The error of a bf16 step's loss and gradient norm, against unpatched float32 on the same
images, may be twice that of an unpatched bf16 step, plus one rounding; both are medians over several draws of images,
for one rounding may select another proposal of a two-stage model. mmdet's DINO runs on mmcv-lite.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import deformops_models as dm
from deformops_models.bench.measure import quantiles
from deformops_models.bench.record import Recorder, machine

LABELS = 80
SEEDS = range(100, 107)


def mask2former(batch: int = 2, size: int = 512) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    swin = SwinConfig(out_features=["stage1", "stage2", "stage3", "stage4"], depths=[2, 2, 6, 2])
    model = Mask2FormerForUniversalSegmentation(Mask2FormerConfig(backbone_config=swin, num_labels=LABELS))

    def loss(m: nn.Module) -> Tensor:
        pixels = torch.randn(batch, 3, size, size, device="cuda")
        masks = [(torch.rand(5, size // 64, size // 64, device="cuda") > 0.6).float() for _ in range(batch)]
        masks = [nn.functional.interpolate(m[None], size=(size, size))[0] for m in masks]
        classes = [torch.randint(LABELS, (5,), device="cuda") for _ in range(batch)]
        return m(pixel_values=pixels, mask_labels=masks, class_labels=classes).loss

    return model, loss


def deformable_detr(batch: int = 2, height: int = 800, width: int = 1333):
    from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection, ResNetConfig

    resnet = ResNetConfig(out_features=["stage2", "stage3", "stage4"])
    config = DeformableDetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=resnet, num_labels=LABELS
    )

    def loss(m: nn.Module) -> Tensor:
        pixels = torch.randn(batch, 3, height, width, device="cuda")
        labels = [
            {
                "class_labels": torch.randint(LABELS, (7,), device="cuda"),
                "boxes": torch.rand(7, 4, device="cuda") * 0.4 + 0.3,
            }
            for _ in range(batch)
        ]
        return m(pixel_values=pixels, labels=labels).loss

    return DeformableDetrForObjectDetection(config), loss


def dino(batch: int = 2, height: int = 800, width: int = 1333):
    from deformops_models.patches import mmcv_lite

    mmcv_lite.install()
    import mmdet
    from mmdet.registry import MODELS
    from mmdet.structures import DetDataSample
    from mmdet.utils import register_all_modules
    from mmengine.config import Config
    from mmengine.structures import InstanceData

    register_all_modules()
    configs = Path(mmdet.__file__).parent / ".mim" / "configs"
    config = Config.fromfile(configs / "dino" / "dino-4scale_r50_8xb2-12e_coco.py").model
    config.backbone.init_cfg = None
    model = MODELS.build(config)
    model.init_weights()

    def sample() -> DetDataSample:
        corner = torch.rand(7, 2, device="cuda") * torch.tensor([width, height], device="cuda") * 0.6
        boxes = torch.cat([corner, corner + 30 + torch.rand(7, 2, device="cuda") * 250], 1)
        shape = (height, width)
        data = DetDataSample(metainfo={"img_shape": shape, "batch_input_shape": shape, "ori_shape": shape})
        data.gt_instances = InstanceData(bboxes=boxes, labels=torch.randint(LABELS, (7,), device="cuda"))
        return data

    def loss(m: nn.Module) -> Tensor:
        losses = m.loss(torch.randn(batch, 3, height, width, device="cuda"), [sample() for _ in range(batch)])
        return sum(sum(part) if isinstance(part, list) else part for part in losses.values())

    return model, loss


MODELS = {"mask2former_swin_t_512": mask2former, "deformable_detr_r50": deformable_detr, "dino_r50": dino}


def step(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], autocast: bool, seed: int) -> tuple[float, float]:
    """Loss and gradient norm of one step on images drawn from `seed`."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = loss_of(model)
    loss.backward()
    norm = torch.stack([p.grad.float().norm() for p in model.parameters() if p.grad is not None]).norm()
    return loss.item(), norm.item()


def timed(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], repeats: int = 8) -> tuple[float, float, float]:
    """Wall time of a bf16 forward and backward pass in ms."""
    samples = []
    for i in range(repeats + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(model, loss_of, autocast=True, seed=i)
        torch.cuda.synchronize()
        if i >= 3:
            samples.append((time.perf_counter() - start) * 1e3)
    return quantiles(samples)


def measure(recorder: Recorder, name: str) -> bool:
    torch.manual_seed(3)
    model, loss_of = MODELS[name]()
    model = model.cuda().train()
    for key, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Both start out as zero, which would leave the paths through them untested.
        if key.endswith(("sampling_offsets", "attention_weights")):
            nn.init.normal_(module.weight, std=0.02)
    row = {"op": "train_step", "preset": name, "distribution": "random", "dtype": "bfloat16"}
    exact = [step(model, loss_of, False, seed) for seed in SEEDS]
    found = {}
    for provider in ("upstream", "ours"):
        if provider == "ours":
            dm.patch(model)
        found[provider] = [step(model, loss_of, True, seed) for seed in SEEDS]
        dm.call_counts.clear()
        torch.cuda.reset_peak_memory_stats()
        times = timed(model, loss_of)
        peak = torch.cuda.max_memory_allocated() / 2**20
        print(f"{name} {provider}: {times[0]:.1f} ms, {peak:,.0f} MiB", flush=True)
        recorder.add(*times, **row, provider=provider, metric="step_ms", unit="ms")
        recorder.add(peak, **row, provider=provider, metric="peak_mib", unit="MiB")
    counts = dict(dm.call_counts)
    good = counts.get("msda_forward", 0) > 0 and counts.get("msda_backward", 0) > 0
    good = good and not counts.get("upstream_forward")
    recorder.add(counts.get("msda_forward", 0), **row, provider="ours", metric="kernel_calls", unit="1")
    for i, quantity in enumerate(("loss", "grad_norm")):
        errors = {
            provider: median(abs(value[i] - true[i]) / abs(true[i]) for value, true in zip(values, exact, strict=True))
            for provider, values in found.items()
        }
        for provider, error in errors.items():
            recorder.add(error, **row, provider=provider, metric=f"error_{quantity}", unit="1")
        budget = 2 * (errors["upstream"] + torch.finfo(torch.bfloat16).eps)
        good = good and errors["ours"] <= budget
    print(name, "loss and gradient norm", exact, found, counts, "PASS" if good else "FAIL", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV file to append to")
    parser.add_argument("--commit", help="recorded with each row; default: the checkout's HEAD")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    recorder = Recorder(args.out, machine(args.commit))
    passed = [measure(recorder, name) for name in args.models]
    raise SystemExit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
