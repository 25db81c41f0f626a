"""Checkpoints of mmdet: a config, which is Python code, and a file of weights."""

from __future__ import annotations

import copy
import hashlib
import http.client
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from deformops_models.backend import Backend
from deformops_models.hub import table
from deformops_models.hub.table import Checkpoint, CheckpointError, find_checkpoint


class DINO:
    """Loads DINO and its relatives of mmdet, patched; a full mmcv is not needed, mmcv-lite is enough."""

    model_types: ClassVar[tuple[str, ...]] = ("DINO", "DeformableDETR", "DDQDETR", "Mask2Former")

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        checkpoint: str | Path | None = None,
        *,
        backend: Backend | str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        cfg_options: Mapping[str, Any] | None = None,
        strict: bool = True,
    ) -> nn.Module:
        """Returns mmdet's detector with its weights, patched, in eval mode, ready for `mmdet.apis.inference_detector`.

        The pickle of a .pth file is read with weights_only; mmengine's training logs in it are dropped unread. A config
        file is Python code that mmengine runs: take it from where you would take code. mmengine's Runner initialises
        any model that it trains: give it the same file as `load_from`.

        Args:
            name_or_path: alias of checkpoints.toml, mmdet config file, or folder with one config and one weights file.
            checkpoint: .pth or .safetensors file; needed with a config file, and with an alias it saves the download.
                If its name ends in `-<8 hex digits>`, as mmdet's do, its SHA-256 has to begin with them; digits without
                a letter are taken for a date.
            backend: of the patched modules, as in `patch`.
            device: where the model goes, the CPU by default.
            dtype: of the weights, float32 by default. mmdet feeds float32 images and positions, so run a half-precision
                model in `torch.autocast`.
            cfg_options: entries of the config to replace, such as {"model.test_cfg.max_per_img": 100}.
            strict: missing or unexpected weights are an error, otherwise a warning; weights of another shape are always
                an error.

        Raises:
            CheckpointError: the name is unknown, a file is missing, damaged or does not fit the config, or the download
                failed.
        """
        dtype = torch.float32 if dtype is None else table.as_dtype(dtype)
        backend, device = table.target(backend, device)
        path, weights, row = cls._locate(name_or_path, checkpoint)
        config = cls._config(path)
        config.merge_from_dict(dict(cfg_options or {}))
        if weights is None and row is None:
            raise CheckpointError(f"{path} is only a config: use DINO.from_pretrained(config, checkpoint)")
        weights = weights or _download(row)
        _check_sha256(weights)
        state, meta = _read_weights(weights)

        model = _build(config)
        _load_state(model, state, weights, strict)
        model.cfg = config
        model.dataset_meta = _dataset_meta(model, config, meta, weights)
        return table.ready(model.to(dtype), backend, device)

    @classmethod
    def processor(cls, name_or_path: str | Path, size: str = "eval") -> ImagePipeline:
        """Returns a callable that turns images into the argument of `model.test_step`.

        Args:
            name_or_path: as in `from_pretrained`; no weights are read.
            size: "eval" or "hub": both are the config's test pipeline.
        """
        if size not in ("eval", "hub"):
            raise ValueError(f'size is {size!r}: use "eval" or "hub"')
        return ImagePipeline(cls._config(cls._locate(name_or_path, None)[0]))

    @classmethod
    def _locate(
        cls, name_or_path: str | Path, checkpoint: str | Path | None
    ) -> tuple[Path, Path | None, Checkpoint | None]:
        """Returns the config file, the weights file if it is local, and the row of checkpoints.toml if there is one."""
        table.check_name(name_or_path)
        path, weights, row = Path(name_or_path).expanduser(), checkpoint and Path(checkpoint).expanduser(), None
        if weights and not weights.is_file():
            raise CheckpointError(f"no such file: {weights}")
        if path.is_dir():
            folder = path
            path = _only_file(folder, "*.py")
            weights = weights or _only_file(folder, "*.safetensors", "*.pth")
        elif not path.is_file():
            if path.suffix == ".py":
                raise CheckpointError(f"no such file: {path}")
            row = find_checkpoint(str(name_or_path))
            if row.loader != cls.__name__:
                raise CheckpointError(
                    f"{row.alias} is a checkpoint of {row.framework}: use {row.loader}.from_pretrained"
                )
            path = mmdet_config(row.config)
        return path, weights, row

    @classmethod
    def _config(cls, path: Path) -> Any:
        _prepare_mmdet()
        from mmengine.config import Config

        try:
            config = Config.fromfile(path)
        # A config is Python code: it can raise anything.
        except Exception as error:
            raise CheckpointError(f"cannot read the config {path}: {table.first_line(error)}") from error
        found = config.get("model", {}).get("type")
        if found not in cls.model_types:
            raise CheckpointError(f"{path} builds {found!r}: DINO loads mmdet's {', '.join(cls.model_types)}")
        return config


class ImagePipeline:
    """The test pipeline of an mmdet config, for images in memory and for files."""

    def __init__(self, config: Any) -> None:
        from mmcv.transforms import Compose
        from mmdet.utils import get_test_pipeline_cfg
        from mmengine.registry import init_default_scope

        init_default_scope("mmdet")
        if not config.get("test_dataloader"):
            raise CheckpointError(
                f"{config.filename} has no test_dataloader, whose pipeline prepares images: add it to the config"
            )
        # Images here have no annotations, and panoptic ones need another package to be read.
        steps = [step for step in get_test_pipeline_cfg(config) if not _reads_annotations(step)]
        self.from_file = Compose(steps)
        self.from_array = Compose([{**steps[0], "type": "mmdet.LoadImageFromNDArray"}, *steps[1:]])

    def __call__(self, images: Any) -> dict[str, list[Any]]:
        """Prepares one image or a list of them for `model.test_step`.

        Args:
            images: PIL image, RGB array (H, W, 3) of uint8, path, or a list of these.

        Returns:
            `inputs`, a list of (3, H', W') tensors in mmdet's BGR order, and `data_samples`, their sizes and scales.
        """
        prepared = [self._prepare(x) for x in (images if isinstance(images, (list, tuple)) else [images])]
        return {key: [data[key] for data in prepared] for key in ("inputs", "data_samples")}

    def _prepare(self, image: Any) -> dict[str, Any]:
        import numpy as np
        from PIL import ImageOps

        if isinstance(image, (str, Path)):
            return self.from_file({"img_path": str(image), "img_id": 0})
        # OpenCV turns a file's image upright too.
        array = np.asarray(ImageOps.exif_transpose(image).convert("RGB") if hasattr(image, "convert") else image)
        if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
            raise ValueError(f"an image array is (H, W, 3) in uint8 and RGB order, got {array.shape} of {array.dtype}")
        return self.from_array({"img": np.ascontiguousarray(array[..., ::-1]), "img_id": 0})


def _reads_annotations(step: Mapping[str, Any]) -> bool:
    name = getattr(step["type"], "__name__", step["type"]).rpartition(".")[2]
    return name.startswith("Load") and name.endswith("Annotations")


def _prepare_mmdet() -> None:
    """Imports mmdet, with the stand-in for mmcv's compiled operators where there are none."""
    from deformops_models.patches import mmcv_lite

    try:
        mmcv_lite.install()
        import mmdet.models  # noqa: F401
    except ModuleNotFoundError as error:
        package = table.package(error)
        raise CheckpointError(f"{package} is not installed: pip install 'deformops-models[mmdet]'") from error


def mmdet_config(name: str) -> Path:
    """The path of a config that mmdet ships, named from its root, as "configs/dino/....py"."""
    _prepare_mmdet()
    import mmdet

    package = Path(mmdet.__file__).parent
    # A wheel holds the configs in .mim; in a checkout of mmdet they lie beside the package.
    for path in (package / ".mim" / name, package.parent / name):
        if path.is_file():
            return path
    raise CheckpointError(f"mmdet {mmdet.__version__} in {package} has no {name}: install mmdet 3.3.0")


def _only_file(folder: Path, *patterns: str) -> Path:
    found = next((files for p in patterns if (files := sorted(folder.glob(p)))), [])
    if len(found) != 1:
        names = f"{len(found)} ({', '.join(f.name for f in found)})" if found else "none"
        raise CheckpointError(
            f"{folder} should hold one {' or '.join(patterns)} file, it holds {names}: "
            "name both files, DINO.from_pretrained(config, checkpoint)"
        )
    return found[0]


def _download(row: Checkpoint) -> Path:
    """Returns the file in torch.hub's cache, fetched if it is not there yet."""
    target = Path(torch.hub.get_dir()) / "checkpoints" / row.url.rpartition("/")[2]
    if not target.is_file():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(row.url, str(target), hash_prefix=row.sha256_prefix)
        except (OSError, http.client.HTTPException, RuntimeError) as error:
            raise CheckpointError(
                f"cannot download {row.alias} from {row.url}: {error}. Without a connection, fetch the file on another "
                f"machine and put it into {target.parent}, or pass it: DINO.from_pretrained({row.alias!r}, checkpoint)"
            ) from error
    return target


def _check_sha256(path: Path) -> None:
    expected = re.search(r"-(?=\d*[a-f])([0-9a-f]{8})\.(?:pth|safetensors)$", path.name)
    if expected is None:
        return
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if not digest.hexdigest().startswith(expected[1]):
        raise CheckpointError(
            f"{path} is damaged or was changed: its SHA-256 begins with {digest.hexdigest()[:8]}, its name says "
            f"{expected[1]}; fetch it again, or rename it if the change is yours"
        )


class _Dropped:
    """Takes the place of mmengine's training logs in a checkpoint, which nothing here reads."""

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _safe_globals() -> list[Any]:
    """Everything besides tensors that mmengine's checkpoints hold, under the names of NumPy 1 and 2."""
    import numpy as np

    core = np.core.multiarray if np.__version__.startswith("1.") else np._core.multiarray
    allowed = [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"]}]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        allowed += [(core.scalar, f"{module}.scalar"), (core._reconstruct, f"{module}._reconstruct")]
    # A HistoryBuffer pickles its methods through getattr; the real one would undo what weights_only is for.
    return [*allowed, (_Dropped, "mmengine.logging.history_buffer.HistoryBuffer"), (_Dropped, "builtins.getattr")]


def _read_weights(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns the state dict and mmengine's meta data (empty for safetensors)."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path), {}
        with torch.serialization.safe_globals(_safe_globals()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it holds {refused[1]}, which is not loaded from a pickle" if refused else "its pickle is damaged"
        raise CheckpointError(
            f"cannot read {path}: {reason}; if you trust the file, save its state_dict alone and load that"
        ) from error
    except Exception as error:
        raise CheckpointError(f"cannot read {path}: {table.first_line(error)}") from error
    state = content.get("state_dict", content) if isinstance(content, dict) else None
    if not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(f"{path} holds no state dict")
    return {key.removeprefix("module."): value for key, value in state.items()}, content.get("meta") or {}


def _build(config: Any) -> nn.Module:
    from mmdet.registry import MODELS
    from mmengine.model import revert_sync_batchnorm
    from mmengine.registry import init_default_scope

    init_default_scope("mmdet")
    # Building writes into its argument, and the model keeps a config that can be built again.
    return revert_sync_batchnorm(MODELS.build(copy.deepcopy(config.model)))


def _dataset_meta(model: nn.Module, config: Any, meta: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns classes and palette as the checkpoint has them, else as the config's test data set has them.

    Where these are not as many classes as the model's, they are called class_0, class_1 and so on.
    """
    saved = {key.lower(): value for key, value in (meta.get("dataset_meta") or {}).items() if value is not None}
    # Checkpoints from before mmdet 3 have the classes alone.
    old = {"classes": meta["CLASSES"]} if meta.get("CLASSES") else {}
    found = {"palette": "random", **_config_meta(config), **old, **saved}
    names = found.get("classes") or ()
    found["classes"] = names = (names,) if isinstance(names, str) else tuple(names)
    count = (model.panoptic_head if hasattr(model, "panoptic_head") else model.bbox_head).num_classes
    if len(names) != count:
        warnings.warn(
            f"{path} has {count} classes, but it or its config's test data set names {len(names)}: they are called "
            "class_0, class_1, ...; set model.dataset_meta['classes'] to their names",
            stacklevel=3,
        )
        found |= {"classes": tuple(f"class_{i}" for i in range(count)), "palette": "random"}
    return found


def _config_meta(config: Any) -> dict[str, Any]:
    """Returns the meta data of the config's test data set, without building it: its pipeline can need more packages."""
    from mmdet.registry import DATASETS

    dataset = (config.get("test_dataloader") or {}).get("dataset") or {}
    # Wrappers such as ConcatDataset hold others.
    while inner := dataset.get("dataset") or next(iter(dataset.get("datasets") or ()), None):
        dataset = inner
    kind = dataset.get("type")
    kind = DATASETS.get(kind) if isinstance(kind, str) else kind
    return kind._load_metainfo(dataset.get("metainfo")) if hasattr(kind, "_load_metainfo") else {}


def _load_state(model: nn.Module, state: dict[str, torch.Tensor], path: Path, strict: bool) -> None:
    try:
        keys = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} does not fit the config: {reason}") from error
    # Old checkpoints lack this counter of batch norm, and frozen batch norm does not use it.
    missing = [key for key in keys.missing_keys if not key.endswith("num_batches_tracked")]
    problems = [
        f"{len(found)} {kind} ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})"
        for kind, found in (("missing", missing), ("unexpected", keys.unexpected_keys))
        if found
    ]
    if problems:
        message = f"{path} does not fit the config: weights {' and '.join(problems)}"
        if strict:
            raise CheckpointError(message + "; strict=False loads the others")
        warnings.warn(message, stacklevel=3)
