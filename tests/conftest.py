"""Where the kernels run: in Triton's interpreter on machines without a GPU, compiled where there is one."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Triton reads it when the kernels are imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if item.get_closest_marker("multigpu") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs"))


@pytest.fixture(params=[pytest.param("cpu", id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """The device on which `backend="triton"` runs the kernels."""
    if request.param == "cpu" and HAS_GPU:
        pytest.skip("the kernels are compiled in this process, so they do not run on the CPU")
    return request.param


@pytest.fixture(autouse=True)
def _seed():
    # Fresh inputs every run; the seed of a failing run is printed with it.
    seed = torch.seed() % 2**31
    torch.manual_seed(seed)
    print(f"torch.manual_seed({seed})")


@pytest.fixture(scope="module")
def wide_tiles():
    """The interpreter's time goes per program: gives each one more queries."""
    if HAS_GPU:
        yield
        return
    from deformops_models.kernels import _launch

    with pytest.MonkeyPatch.context() as monkeypatch:
        configure = _launch.configure
        monkeypatch.setattr(_launch, "configure", lambda *args: (256, *configure(*args)[1:]))
        _launch._plan.cache_clear()
        yield
    _launch._plan.cache_clear()


@pytest.fixture
def cell(record_property):
    """Tells docs/compile_table.py which cell of its table a test decides."""

    def record(model: str, recipe: str, device: str) -> None:
        for name, value in (("model", model), ("recipe", recipe), ("device", device)):
            record_property(name, value)

    return record
