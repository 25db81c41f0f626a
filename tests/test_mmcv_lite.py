"""The stand-in for mmcv's compiled operators. What it does to `sys.modules` is tested in fresh processes."""

import subprocess
import sys
import textwrap

import pytest
import torch

pytest.importorskip("mmengine")
mmcv = pytest.importorskip("mmcv")

from deformops_models.patches import mmcv_lite  # noqa: E402

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def run(code, *arguments):
    """Runs code in a fresh interpreter and returns its standard output."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def lite():
    import importlib.util

    if "mmcv._ext" not in sys.modules and importlib.util.find_spec("mmcv._ext") is not None:
        pytest.skip("mmcv is compiled")


# Installation


def test_install_makes_mmcv_ops_importable(lite):
    output = run("""
        import importlib.util, inspect, sys
        import torch
        from deformops_models.patches import mmcv_lite
        assert "mmcv._ext" not in sys.modules
        assert mmcv_lite.install() is True
        stand_in = sys.modules["mmcv._ext"]
        assert mmcv_lite.install() is True and sys.modules["mmcv._ext"] is stand_in
        from mmcv.ops import MultiScaleDeformableAttention, RoIAlign, get_compiler_version
        from mmcv.cnn.bricks import transformer
        assert transformer.MultiScaleDeformableAttention is MultiScaleDeformableAttention
        assert importlib.util.find_spec("mmcv._ext").loader is None
        assert not hasattr(stand_in, "__file__") and inspect.getmodule(stand_in) is stand_in
        for call in (lambda: RoIAlign(2)(torch.zeros(1, 1, 4, 4), torch.zeros(1, 5)), get_compiler_version):
            try:
                call()
            except NotImplementedError as error:
                print(error)
    """)
    lines = output.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("the mmcv operator 'roi_align_forward' is compiled code")
    assert lines[1].startswith("the mmcv operator 'get_compiler_version' is compiled code")
    assert all("install a full mmcv 2.1 in place of mmcv-lite" in line for line in lines)


def test_install_after_mmcv_and_mmdet_were_imported_in_vain(lite):
    pytest.importorskip("mmdet")
    output = run("""
        import mmcv.cnn.bricks.transformer as bricks
        try:
            import mmdet.models
        except ModuleNotFoundError as error:
            print(error.name, hasattr(bricks, "MultiScaleDeformableAttention"))
        from deformops_models.patches import mmcv_lite
        mmcv_lite.install()
        from mmcv.ops import MultiScaleDeformableAttention
        import mmdet.models
        print(mmdet.models.DINO.__name__, bricks.MultiScaleDeformableAttention is MultiScaleDeformableAttention)
    """)
    assert output.splitlines() == ["mmcv._ext False", "DINO True"]


def test_compiled_mmcv_is_left_alone(tmp_path):
    (tmp_path / "mmcv").mkdir()
    (tmp_path / "mmcv" / "__init__.py").write_text("")
    (tmp_path / "mmcv" / "_ext.py").write_text("compiled = True")
    output = run(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        from deformops_models.patches import mmcv_lite
        print(mmcv_lite.install(), "mmcv._ext" in sys.modules)
        from mmcv import _ext
        print(mmcv_lite.install(), _ext.compiled, sys.modules["mmcv._ext"] is _ext)
        """,
        tmp_path,
    )
    assert output.split() == ["False", "False", "False", "True", "True"]


# Operators


def greedy_nms(boxes, scores, threshold, offset):
    kept = []
    for i in scores.argsort(descending=True, stable=True).tolist():
        for j in kept:
            left, top = (max(boxes[i][k], boxes[j][k]) for k in (0, 1))
            right, bottom = (min(boxes[i][k], boxes[j][k]) for k in (2, 3))
            inter = max(right - left + offset, 0) * max(bottom - top + offset, 0)
            area = [(b[2] - b[0] + offset) * (b[3] - b[1] + offset) for b in (boxes[i], boxes[j])]
            if inter > threshold * (area[0] + area[1] - inter):
                break
        else:
            kept.append(i)
    return kept


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("threshold", [0.1, 0.4, 0.7])
def test_nms_equals_the_greedy_loop(monkeypatch, offset, threshold):
    monkeypatch.setattr(mmcv_lite, "_NMS_BLOCK", 16)
    generator = torch.Generator().manual_seed(3)
    corner = torch.rand(100, 2, generator=generator, dtype=torch.float64) * 20
    boxes = torch.cat([corner, corner + 1 + torch.rand(100, 2, generator=generator) * 10], 1)
    scores = torch.randint(0, 30, (100,), generator=generator) / 30  # with ties
    kept = mmcv_lite.nms(boxes, scores, iou_threshold=threshold, offset=offset)
    assert kept.dtype == torch.int64
    assert kept.tolist() == greedy_nms(boxes.tolist(), scores, threshold, offset)
    assert 0 < len(kept) < 100


def test_nms_equals_torchvision():
    ops = pytest.importorskip("torchvision.ops")
    generator = torch.Generator().manual_seed(4)
    corner = torch.rand(3000, 2, generator=generator) * 300
    boxes = torch.cat([corner, corner + torch.rand(3000, 2, generator=generator) * 60], 1)
    scores = torch.rand(3000, generator=generator)
    assert torch.equal(mmcv_lite.nms(boxes, scores, iou_threshold=0.5, offset=0), ops.nms(boxes, scores, 0.5))


def test_nms_chain_and_nothing():
    # Each box overlaps its neighbour only, so the greedy rule keeps every other one.
    boxes = torch.tensor([[i, 0.0, i + 2.0, 1.0] for i in range(9)])
    assert mmcv_lite.nms(boxes, torch.arange(9.0, 0, -1), iou_threshold=0.3, offset=0).tolist() == [0, 2, 4, 6, 8]
    assert mmcv_lite.nms(boxes[:0], boxes[:0, 0], iou_threshold=0.3, offset=0).tolist() == []


def focal_operands(dtype):
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(40, 7, generator=generator, dtype=torch.float64) * 4).to(dtype)
    target = torch.randint(0, 8, (40,), generator=generator)  # 7 is background
    return logits, target


def upstream_focal_loss(logits, target, gamma, alpha):
    pytest.importorskip("mmdet")
    mmcv_lite.install()
    from mmdet.models.losses.focal_loss import py_sigmoid_focal_loss

    one_hot = torch.nn.functional.one_hot(target, 8)[:, :7]
    return py_sigmoid_focal_loss(logits, one_hot, gamma=gamma, alpha=alpha, reduction="none")


@pytest.mark.parametrize("gamma, alpha", [(2.0, 0.25), (1.5, 0.6)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_focal_loss_equals_mmdet(lite, dtype, gamma, alpha):
    logits, target = focal_operands(dtype)
    exact = logits.double().requires_grad_()
    expected = upstream_focal_loss(exact, target, gamma, alpha)
    (expected_grad,) = torch.autograd.grad(expected.sum(), exact)
    nothing = logits.new_empty(0)
    loss, grad = torch.full_like(logits, torch.nan), torch.full_like(logits, torch.nan)
    mmcv_lite.sigmoid_focal_loss_forward(logits, target, nothing, loss, gamma=gamma, alpha=alpha)
    mmcv_lite.sigmoid_focal_loss_backward(logits, target, nothing, grad, gamma=gamma, alpha=alpha)
    # One rounding to the dtype on top of float32 arithmetic.
    rtol = max(torch.finfo(dtype).eps, 1e-5 if dtype != torch.float64 else 1e-12)
    atol = torch.finfo(dtype).smallest_normal if dtype == torch.float16 else 1e-9
    torch.testing.assert_close(loss.double(), expected, rtol=rtol, atol=atol)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=rtol, atol=atol)


def test_focal_loss_through_mmcv(lite):
    mmcv_lite.install()
    from mmcv.ops import sigmoid_focal_loss

    logits, target = focal_operands(torch.float64)
    logits.requires_grad_()
    scale = torch.rand_like(logits)
    (expected,) = torch.autograd.grad(upstream_focal_loss(logits, target, 2.0, 0.25), logits, scale)
    loss = sigmoid_focal_loss(logits, target, 2.0, 0.25, None, "none")
    torch.testing.assert_close(loss, upstream_focal_loss(logits, target, 2.0, 0.25))
    torch.testing.assert_close(torch.autograd.grad(loss, logits, scale)[0], expected)


def test_focal_loss_class_weights():
    logits, target = focal_operands(torch.float64)
    weight = torch.arange(1.0, 8.0, dtype=torch.float64)
    plain, weighted = torch.empty_like(logits), torch.empty_like(logits)
    mmcv_lite.sigmoid_focal_loss_forward(logits, target, logits.new_empty(0), plain, gamma=2.0, alpha=0.25)
    mmcv_lite.sigmoid_focal_loss_forward(logits, target, weight, weighted, gamma=2.0, alpha=0.25)
    factor = torch.tensor([*weight, 1.0], dtype=torch.float64)[target]
    torch.testing.assert_close(weighted, plain * factor[:, None])


def test_focal_loss_of_large_logits_is_finite():
    logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0]])
    target = torch.tensor([0, 0])
    loss, grad = torch.empty_like(logits), torch.empty_like(logits)
    for output, op in ((loss, mmcv_lite.sigmoid_focal_loss_forward), (grad, mmcv_lite.sigmoid_focal_loss_backward)):
        op(logits, target, logits.new_empty(0), output, gamma=2.0, alpha=0.25)
    torch.testing.assert_close(loss, torch.tensor([[0.0, 0.0], [50.0, 150.0]]))
    torch.testing.assert_close(grad, torch.tensor([[0.0, 0.0], [-0.25, 0.75]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpatched_attention_runs_in_plain_torch(lite, dtype):
    mmcv_lite.install()
    from mmcv.ops.multi_scale_deform_attn import (
        MultiScaleDeformableAttnFunction,
        multi_scale_deformable_attn_pytorch,
    )

    generator = torch.Generator().manual_seed(6)
    shapes = torch.tensor([[5, 7], [3, 2]])
    starts = torch.tensor([0, 35])
    value = torch.randn(2, 41, 2, 4, generator=generator).to(dtype).requires_grad_()
    locations = torch.rand(2, 6, 2, 2, 3, 2, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(2, 6, 2, 2, 3, generator=generator).to(dtype).requires_grad_()
    inputs = (value, locations, weights)
    with pytest.warns(UserWarning, match=r"plain PyTorch; deformops_models\.patch\(model\)"):
        output = MultiScaleDeformableAttnFunction.apply(value, shapes, starts, locations, weights, 64)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = multi_scale_deformable_attn_pytorch(exact[0], shapes, *exact[1:])
    scale = torch.randn(expected.shape, generator=generator).to(dtype)
    assert output.dtype == dtype
    tolerance = {"rtol": max(torch.finfo(dtype).eps, 1e-6), "atol": max(torch.finfo(dtype).eps, 1e-5)}
    torch.testing.assert_close(output.double(), expected, **tolerance)
    gradients = torch.autograd.grad(output, inputs, scale)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected, exact, scale.double()), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance["rtol"], atol=10 * tolerance["atol"])
