"""Ways in which people use whole models, patched against unpatched: what other libraries do to them, threads, moves."""

import copy
import threading

import pytest
import torch
from helpers import close, close_all, launches, relative_error
from models import DETECTORS, attentions, outputs, pixels_and_mask, reproducible, training_step
from torch import nn

import deformops_models as dm
from deformops_models.patching import PatchedModule

PROJECTIONS = ("sampling_offsets", "attention_weights", "value_proj", "output_proj")
RT_DETR = DETECTORS["hf-rt-detr"]
DETR = DETECTORS["hf-deformable-detr-single-scale"]


@pytest.fixture
def rt_detr(device) -> nn.Module:
    pytest.importorskip("transformers")
    return RT_DETR.build().to(device)


@pytest.fixture
def detr(device) -> nn.Module:
    pytest.importorskip("transformers")
    return DETR.build().to(device)


def patched(model: nn.Module) -> nn.Module:
    return dm.patch(model, backend="triton")


# transformers


def test_pipeline(rt_detr, device):
    transformers = pytest.importorskip("transformers")
    Image = pytest.importorskip("PIL.Image")
    processor = transformers.RTDetrImageProcessor(size={"height": 64, "width": 96})
    image = Image.effect_noise((120, 80), 90).convert("RGB")

    def detect(model):
        run = transformers.pipeline("object-detection", model=model, image_processor=processor, device=device)
        return run(image, threshold=0.0)

    expected = detect(copy.deepcopy(rt_detr))
    with launches(RT_DETR.attentions):
        found = detect(patched(rt_detr))
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours["label"], ours["box"]) == (theirs["label"], theirs["box"])
        assert ours["score"] == pytest.approx(theirs["score"], rel=1e-4)


def test_trainer(detr, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    cuda = next(detr.parameters()).is_cuda
    pixels, mask = (t.cpu() for t in pixels_and_mask(detr))
    boxes = torch.tensor([[0.4, 0.4, 0.3, 0.3]])
    samples = [
        {"pixel_values": p, "pixel_mask": m, "labels": {"class_labels": torch.tensor([1]), "boxes": boxes}}
        for p, m in zip(pixels, mask, strict=True)
    ]

    def collate(batch):
        stacked = {name: torch.stack([s[name] for s in batch]) for name in ("pixel_values", "pixel_mask")}
        return stacked | {"labels": [dict(s["labels"]) for s in batch]}

    def train(model, folder):
        settings = transformers.TrainingArguments(
            str(folder), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-3, save_strategy="no",
            optim="sgd", report_to=[], remove_unused_columns=False, use_cpu=not cuda, disable_tqdm=True, seed=3,
        )  # fmt: skip
        trainer = transformers.Trainer(model, settings, train_dataset=samples, data_collator=collate)
        loss = trainer.train().training_loss
        trainer.save_model(str(folder))
        return loss, {name: p.detach().cpu() for name, p in model.named_parameters()}

    plain_loss, plain = train(copy.deepcopy(detr), tmp_path / "plain")
    with launches(2 * DETR.attentions):
        loss, trained = train(patched(detr), tmp_path / "patched")
    assert loss == pytest.approx(plain_loss, rel=1e-4)
    assert all(relative_error(trained[name], plain[name]) < 1e-4 for name in plain)
    again = type(copy.deepcopy(dm.unpatch(detr))).from_pretrained(tmp_path / "patched")
    assert not any(isinstance(module, PatchedModule) for module in again.modules())
    assert all(torch.equal(p.detach(), trained[name]) for name, p in again.named_parameters())


@pytest.mark.parametrize("disabled", [True, False])
def test_disable_custom_kernels_speaks_of_transformers_own(rt_detr, disabled):
    # On a GPU upstream would fetch a kernel from the Hub where it is False.
    expected = outputs(RT_DETR, rt_detr)["['logits']"]
    for module in attentions(rt_detr, RT_DETR).values():
        module.disable_custom_kernels = disabled
    with launches(RT_DETR.attentions):
        close(outputs(RT_DETR, patched(rt_detr))["['logits']"], expected)


def package_kernels():
    kernels = pytest.importorskip("kernels", reason="the package kernels is not installed")
    if not hasattr(kernels, "kernelize"):
        pytest.skip("`kernels` is this checkout's own folder: the package kernels is not installed")
    return kernels


def kernelize(model: nn.Module, device: str, mapping: dict) -> nn.Module:
    kernels = package_kernels()
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device=device, use_fallback=True)
    return model


def test_kernelize_takes_the_local_layer(rt_detr, device):
    from deformops_models.patches.kernelize import MAPPING, MultiScaleDeformableAttention

    expected = outputs(RT_DETR, rt_detr)["['logits']"]
    cores = [module.attn for module in attentions(rt_detr, RT_DETR).values()]
    if not hasattr(type(cores[0]), "kernel_layer_name"):
        pytest.skip("transformers does not work with the installed version of the package kernels, if there is one")
    model = kernelize(rt_detr, device, MAPPING)
    assert all(core.forward.__func__ is MultiScaleDeformableAttention.forward for core in cores)
    # On the CPU the operator is plain PyTorch unless it is asked for the kernel.
    with launches(RT_DETR.attentions if device == "cuda" else 0):
        close(outputs(RT_DETR, model)["['logits']"], expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_kernelize(rt_detr, device, when):
    expected = outputs(RT_DETR, rt_detr)["['logits']"]
    # No kernel is mapped, so that nothing is fetched; layers with a name are gone through all the same.
    model = kernelize(patched(rt_detr), device, {}) if when == "after" else patched(kernelize(rt_detr, device, {}))
    with launches(RT_DETR.attentions):
        close(outputs(RT_DETR, model)["['logits']"], expected)
    dm.unpatch(model)
    close(outputs(RT_DETR, model)["['logits']"], expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_use_kernels(rt_detr, device, when, tmp_path):
    kernels = package_kernels()
    rt_detr.save_pretrained(tmp_path)
    expected = outputs(RT_DETR, rt_detr)["['logits']"]
    # Nothing is mapped, so that nothing is fetched.
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        try:
            model = type(rt_detr).from_pretrained(tmp_path, use_kernels=when == "before").to(device)
            patched(model).use_kernels = True
        except (ImportError, ValueError) as error:
            pytest.skip(f"transformers does not work with the installed version of the package kernels: {error}")
    with launches(RT_DETR.attentions):
        close(outputs(RT_DETR, model)["['logits']"], expected)
    dm.unpatch(model)
    close(outputs(RT_DETR, model)["['logits']"], expected)


# Adapters and quantised projections


def test_lora_merges_and_unmerges(rt_detr):
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import BaseTunerLayer

    config = peft.LoraConfig(r=2, target_modules=list(PROJECTIONS), init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.inject_adapter_in_model(config, rt_detr)
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    assert len(layers) == len(PROJECTIONS) * RT_DETR.attentions
    expected = outputs(RT_DETR, model)["['logits']"]
    patched(model)
    with launches(3 * RT_DETR.attentions):
        close(outputs(RT_DETR, model)["['logits']"], expected)
        for layer in layers:
            layer.merge()
        close(outputs(RT_DETR, model)["['logits']"], expected)
        for layer in layers:
            layer.unmerge()
        close(outputs(RT_DETR, model)["['logits']"], expected)
    _, gradients = training_step(RT_DETR, model)
    factors = [name for name in gradients if "lora_" in name]
    assert len(factors) == 2 * len(layers) and all(gradients[name].abs().max() > 0 for name in factors)
    for layer in layers:
        layer.enable_adapters(False)
    with launches(RT_DETR.attentions):
        assert relative_error(outputs(RT_DETR, model)["['logits']"], expected) > 1e-3


def _torchao(model: nn.Module) -> nn.Module:
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda m, name: name.endswith(PROJECTIONS))
    return model


def _bitsandbytes(model: nn.Module) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    for name, module in list(model.named_modules()):
        if name.endswith(PROJECTIONS):
            device = module.weight.device
            layer = bnb.nn.Linear4bit(module.in_features, module.out_features, compute_dtype=torch.float32)
            layer.load_state_dict(module.state_dict(), strict=False)
            model.set_submodule(name, layer.to(device))
    return model


@pytest.mark.parametrize("quantize", [_torchao, _bitsandbytes])
@pytest.mark.parametrize("when", ["before", "after"])
def test_quantised_projections(rt_detr, quantize, when):
    exact = outputs(RT_DETR, rt_detr)["['logits']"]
    reference = quantize(copy.deepcopy(rt_detr))
    expected = outputs(RT_DETR, reference)["['logits']"]
    assert relative_error(expected, exact) > 1e-5
    model = quantize(patched(rt_detr)) if when == "after" else patched(quantize(rt_detr))
    with launches(RT_DETR.attentions):
        close(outputs(RT_DETR, model)["['logits']"], expected)


# accelerate and torch.distributed


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["dispatch", "offload"])
def test_a_whole_model_with_accelerates_hooks(rt_detr, device, how, when):
    accelerate = pytest.importorskip("accelerate")
    expected = outputs(RT_DETR, rt_detr)["['logits']"]

    def place(model):
        if how == "offload":
            return accelerate.cpu_offload(model, execution_device=torch.device(device))
        return accelerate.dispatch_model(model, {"": device}, force_hooks=True)

    model = patched(place(rt_detr)) if when == "before" else place(patched(rt_detr))
    pixels = pixels_and_mask(RT_DETR.build())[0][..., :64, :96].to(device)
    with launches(RT_DETR.attentions), torch.no_grad(), reproducible(model):
        close(model(pixel_values=pixels).logits, expected)


def test_device_map(rt_detr, device, tmp_path):
    pytest.importorskip("accelerate")
    expected = outputs(RT_DETR, rt_detr)["['logits']"]
    rt_detr.save_pretrained(tmp_path)
    model = patched(dm.from_pretrained(tmp_path, device_map={"": device}))
    with launches(RT_DETR.attentions):
        close(outputs(RT_DETR, model)["['logits']"], expected)


@pytest.fixture
def group(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_ddp(detr, group):
    from torch.nn.parallel import DistributedDataParallel

    losses, gradients = training_step(DETR, detr)
    model = DistributedDataParallel(patched(detr), find_unused_parameters=True)
    with launches(DETR.attentions):
        actual_losses, actual = training_step(DETR, model)
    close(actual_losses["['loss']"], losses["['loss']"])
    close_all({name.removeprefix("module."): gradient for name, gradient in actual.items()}, gradients)


def test_fsdp_comes_after_the_patch(detr, device, group):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    if device != "cpu":
        pytest.skip("the mesh is on the CPU, where the compiled kernels do not run")
    _, gradients = training_step(DETR, detr)
    model, late = patched(detr), copy.deepcopy(detr)
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers, model):
        fully_shard(layer, mesh=mesh)
    with launches(DETR.attentions):
        _, actual = training_step(DETR, model)
    close_all({name: gradient.full_tensor() for name, gradient in actual.items()}, gradients)
    dm.unpatch(late)
    for module in attentions(late, DETR).values():
        fully_shard(module, mesh=mesh)
    with pytest.raises(dm.PatchError, match="FSDP owns it: patch before fully_shard"):
        dm.patch(late, parts=("attention",))


# Moves, neighbours, threads


def test_moves_between_dtypes_at_any_time(rt_detr):
    expected = outputs(RT_DETR, rt_detr)["['logits']"]
    exact = outputs(RT_DETR, copy.deepcopy(rt_detr).double())["['logits']"]
    patched(rt_detr)
    with launches(RT_DETR.attentions):
        close(outputs(RT_DETR, rt_detr)["['logits']"], expected)
    rt_detr.double()
    before = dm.call_counts["upstream_forward"]
    close(outputs(RT_DETR, rt_detr)["['logits']"], exact)
    assert dm.call_counts["upstream_forward"] - before == RT_DETR.attentions
    rt_detr.float()
    with launches(RT_DETR.attentions):
        close(outputs(RT_DETR, rt_detr)["['logits']"], expected)
    rt_detr.bfloat16()
    with launches(RT_DETR.attentions):
        assert outputs(RT_DETR, rt_detr)["['logits']"].dtype == torch.bfloat16


@pytest.mark.gpu
def test_moves_between_devices_at_any_time():
    pytest.importorskip("transformers")
    # Without a top-k, which rounding could decide otherwise on another device.
    model = DETR.build()
    expected = outputs(DETR, model)["['logits']"]
    dm.patch(model)
    for device, count in (("cuda", 1), ("cpu", 0), ("cuda", 1)):
        model.to(device)
        before = dm.call_counts["msda_forward"]
        assert relative_error(outputs(DETR, model)["['logits']"], expected) < 1e-3
        assert dm.call_counts["msda_forward"] - before == count * DETR.attentions


def test_two_models_of_which_one_is_patched(rt_detr):
    other = copy.deepcopy(rt_detr)
    expected = outputs(RT_DETR, other)["['logits']"]
    patched(rt_detr)
    for _ in range(2):
        with launches(RT_DETR.attentions):
            close(outputs(RT_DETR, rt_detr)["['logits']"], expected)
        with launches(0):
            assert torch.equal(outputs(RT_DETR, other)["['logits']"], expected)
    assert not any(isinstance(module, PatchedModule) for module in other.modules())


@pytest.mark.gpu
def test_threads_patch_and_run_different_models():
    pytest.importorskip("transformers")
    detectors = [DETECTORS[name] for name in ("hf-rt-detr", "hf-rt-detr-v2", "hf-d-fine", "hf-deformable-detr-refine")]
    models = [detector.build().cuda() for detector in detectors]
    pixels = torch.randn(1, 3, 64, 96, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    errors = []

    def logits(model):
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return model(pixel_values=pixels).logits

    expected = [logits(model) for model in models]

    def work(i):
        try:
            for _ in range(5):
                dm.patch(models[i])
                assert relative_error(logits(models[i]), expected[i]) < 1e-3
                dm.unpatch(models[i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
