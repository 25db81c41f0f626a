"""Published checkpoints and their loaders: an alias, a repo id or local files in, a patched upstream model out."""

from __future__ import annotations

import copy
import difflib
import functools
import hashlib
import http.client
import pickle
import re
import socket
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from deformops_models.backend import Backend


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be found, reached or read. The message is one line and says what to do."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One table of checkpoints.toml. What is not known is None or empty."""

    alias: str
    framework: str
    model_type: str
    task: str
    dataset: str
    backbone: str
    num_queries: int
    num_feature_levels: int
    num_points: int
    source: str
    #: transformers: Hub repo, and the commit that the other facts describe (loading does not pin it).
    repo_id: str | None = None
    revision: str | None = None
    #: mmdet: config file below mmdet's `.mim` folder, weights, and the first 8 hex digits of their SHA-256.
    config: str | None = None
    url: str | None = None
    sha256_prefix: str | None = None
    formats: tuple[str, ...] = ()
    license: str | None = None
    #: Percent, as published; whose numbers they are and where.
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_of: str | None = None
    published: str | None = None
    num_labels: int | None = None
    with_box_refine: bool = False
    two_stage: bool = False
    dilation: bool = False
    #: `size` arguments of an image processor: at which the metric was measured, and what the Hub repo presets.
    eval_size: Mapping[str, int] | None = None
    hub_size: Mapping[str, int] | None = None
    note: str | None = None

    @property
    def loader(self) -> str:
        """Name of the class of this module that loads it."""
        return _LOADERS[self.framework, self.model_type]


_LOADERS = {
    ("transformers", "mask2former"): "Mask2Former",
    ("transformers", "deformable_detr"): "DeformableDETR",
    ("mmdet", "dino"): "DINO",
    ("mmdet", "deformable_detr"): "DINO",
}


#: Models that the package itself holds, by name.
SHIPPED = {"shapes-tiny": Path(__file__).resolve().parent / "shapes_tiny"}


def local_name(name: str) -> str:
    """Returns the folder of a model that the package holds; every other name as it is."""
    folder = SHIPPED.get(name)
    return str(folder) if folder is not None and (folder / "config.json").is_file() else name


@functools.cache
def checkpoints() -> tuple[Checkpoint, ...]:
    """Returns every row of checkpoints.toml, in its order."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    here = Path(__file__).resolve().parent
    # Installed, the file lies beside this module; in a checkout, at the root.
    path = next(p for p in (here / "checkpoints.toml", here.parent / "checkpoints.toml") if p.is_file())
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["checkpoint"]
    return tuple(Checkpoint(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows)


def find_checkpoint(alias_or_repo: str) -> Checkpoint:
    """Returns the row with this alias or Hub repo id, in upper or lower case.

    Raises:
        CheckpointError: there is none; the message names the nearest aliases.
    """
    if row := _find(alias_or_repo):
        return row
    near = difflib.get_close_matches(alias_or_repo.lower(), [row.alias for row in checkpoints()], n=3, cutoff=0.5)
    hint = f"nearest: {', '.join(near)}" if near else "`deformops-models checkpoints` lists them"
    raise CheckpointError(f"unknown checkpoint {alias_or_repo!r}; {hint}")


class _TransformersLoader:
    model_type: ClassVar[str]
    model_class: ClassVar[str]
    processor_class: ClassVar[str]

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        backend: Backend | str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        strict: bool = True,
        **upstream_kwargs: Any,
    ) -> nn.Module:
        """Returns the upstream model with its weights, patched, in eval mode.

        safetensors files are taken where there are any; pickled weights are read by upstream with weights_only.

        Args:
            name_or_path: alias of checkpoints.toml, Hub repo id, local folder as `save_pretrained` writes it, or
                "shapes-tiny", which the package holds.
            backend: of the patched modules, as in `patch`.
            device: where the model goes; by default it stays where upstream puts it.
            dtype: of the weights, such as torch.bfloat16, "bfloat16" or "auto"; by default upstream's own choice.
            strict: parameters that the checkpoint does not hold are an error; otherwise upstream initialises and
                reports them.
            upstream_kwargs: for upstream's `from_pretrained`: revision, cache_dir, local_files_only, token, ...

        Raises:
            CheckpointError: the name is unknown, the checkpoint is of another model type or lacks parameters, the Hub
                cannot be reached and its cache does not hold the files, or a file cannot be read.
        """
        upstream = _upstream(cls.model_class)
        source, row = cls._locate(name_or_path)
        if dtype is not None:
            upstream_kwargs["dtype"] = dtype if dtype == "auto" else _dtype(dtype)
        with _one_error(source, row, upstream_kwargs):
            cls._check_model_type(upstream, source, upstream_kwargs)
            model, loaded = upstream.from_pretrained(source, **upstream_kwargs | {"output_loading_info": True})
        missing = sorted(set(loaded["missing_keys"]) & dict(model.named_parameters()).keys())
        if missing and strict:
            raise CheckpointError(
                f"{source} lacks {len(missing)} parameters of {cls.model_class}, such as {missing[0]}: it holds "
                "another model's weights, or pass strict=False to start them anew"
            )
        return _ready(model, backend, device)

    @classmethod
    def processor(cls, name_or_path: str | Path, size: str = "eval", **upstream_kwargs: Any) -> Any:
        """Returns the upstream image processor.

        Args:
            name_or_path: as in `from_pretrained`.
            size: "eval" resizes to what the published metric was measured at (a short edge of 800 and a long edge of at
                most 1333 where no metric is known); "hub" keeps the repo's or folder's own setting, which squashes to
                384x384 in most Mask2Former repos. A model that the package holds has one size.
            upstream_kwargs: for upstream's `from_pretrained`.

        Raises:
            CheckpointError: as `from_pretrained`.
        """
        if size not in ("eval", "hub"):
            raise ValueError(f'size is {size!r}: use "eval" or "hub"')
        upstream = _upstream(cls.processor_class)
        source, row = cls._locate(name_or_path)
        if size == "eval" and source not in map(str, SHIPPED.values()):
            known = row.eval_size if row else None
            upstream_kwargs["size"] = dict(known or {"shortest_edge": 800, "longest_edge": 1333})
        names = ("preprocessor_config.json", "processor_config.json")
        if Path(source).is_dir() and not any(Path(source, name).is_file() for name in names):
            return upstream(**upstream_kwargs)
        with _one_error(source, row, upstream_kwargs):
            return upstream.from_pretrained(source, **upstream_kwargs)

    @classmethod
    def _locate(cls, name_or_path: str | Path) -> tuple[str, Checkpoint | None]:
        """Returns the folder or Hub repo id to load from, and the row of checkpoints.toml if there is one."""
        name = str(name_or_path)
        if not name:
            raise CheckpointError("the name of the checkpoint is empty")
        name = local_name(name)
        if Path(name).expanduser().is_dir():
            return str(Path(name).expanduser()), None
        row = _find(name)
        if row is None and (isinstance(name_or_path, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1):
            raise CheckpointError(f"no such folder: {name}")
        if row is None and "/" in name:
            return name, None
        row = row or find_checkpoint(name)
        if row.loader != cls.__name__:
            raise CheckpointError(
                f"{row.alias} is a {row.model_type} checkpoint of {row.framework}: use {row.loader}.from_pretrained"
            )
        return row.repo_id, row

    @classmethod
    def _check_model_type(cls, upstream: Any, source: str, kwargs: Mapping[str, Any]) -> None:
        config, _ = upstream.config_class.get_config_dict(source, **kwargs)
        found = config.get("model_type")
        if found != cls.model_type:
            problem = f"its config.json says model_type {found!r}" if config else "it holds no config.json"
            raise CheckpointError(f"{source} is no {cls.model_type} checkpoint: {problem}")


class Mask2Former(_TransformersLoader):
    """Loads transformers' `Mask2FormerForUniversalSegmentation`, patched."""

    model_type = "mask2former"
    model_class = "Mask2FormerForUniversalSegmentation"
    processor_class = "Mask2FormerImageProcessor"


class DeformableDETR(_TransformersLoader):
    """Loads transformers' `DeformableDetrForObjectDetection`, patched."""

    model_type = "deformable_detr"
    model_class = "DeformableDetrForObjectDetection"
    processor_class = "DeformableDetrImageProcessor"


class DINO:
    """Loads mmdet's `DINO` and `DeformableDETR`, patched; a full mmcv is not needed, mmcv-lite is enough."""

    model_types: ClassVar[tuple[str, ...]] = ("DINO", "DeformableDETR")

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
                If its name ends in `-<8 hex digits>`, as mmdet's do, its SHA-256 has to begin with them.
            backend: of the patched modules, as in `patch`.
            device: where the model goes, the CPU by default.
            dtype: of the weights, float32 by default. mmdet feeds float32 images and positions, so run a half-precision
                model in `torch.autocast`.
            cfg_options: entries of the config to replace, such as {"model.test_cfg.max_per_img": 100}.
            strict: missing or unexpected weights are an error, otherwise a warning.

        Raises:
            CheckpointError: the name is unknown, a file is missing, damaged or does not fit the config, or the download
                failed.
        """
        dtype = torch.float32 if dtype is None else _dtype(dtype)
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
        model.dataset_meta = _dataset_meta(config, meta)
        return _ready(model.to(dtype), backend, device)

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
            path = _mmdet_config(row.config)
        return path, weights, row

    @classmethod
    def _config(cls, path: Path) -> Any:
        _prepare_mmdet()
        from mmengine.config import Config

        try:
            config = Config.fromfile(path)
        # A config is Python code: it can raise anything.
        except Exception as error:
            raise CheckpointError(f"cannot read the config {path}: {_first_line(error)}") from error
        found = config.get("model", {}).get("type")
        if found not in cls.model_types:
            raise CheckpointError(f"{path} builds {found!r}: DINO loads mmdet's {' and '.join(cls.model_types)}")
        return config


class ImagePipeline:
    """The test pipeline of an mmdet config, for images in memory and for files."""

    def __init__(self, config: Any) -> None:
        from mmcv.transforms import Compose
        from mmdet.utils import get_test_pipeline_cfg
        from mmengine.registry import init_default_scope

        init_default_scope("mmdet")
        steps = get_test_pipeline_cfg(config)
        self.from_file = Compose(steps)
        self.from_array = Compose([{"type": "mmdet.LoadImageFromNDArray"}, *steps[1:]])

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

        if isinstance(image, (str, Path)):
            return self.from_file({"img_path": str(image), "img_id": 0})
        array = np.asarray(image.convert("RGB") if hasattr(image, "convert") else image)
        if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
            raise ValueError(f"an image array is (H, W, 3) in uint8 and RGB order, got {array.shape} of {array.dtype}")
        return self.from_array({"img": np.ascontiguousarray(array[..., ::-1]), "img_id": 0})


def _find(name: str) -> Checkpoint | None:
    for row in checkpoints():
        if name.lower() in (row.alias, row.repo_id and row.repo_id.lower()):
            return row
    return None


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    found = getattr(torch, short.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}: use a torch.dtype or its name, such as 'bfloat16'")
    return found


def _package(error: ModuleNotFoundError) -> str:
    return (error.name or str(error)).partition(".")[0]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _ready(model: nn.Module, backend: Backend | str | None, device: torch.device | str | None) -> nn.Module:
    from deformops_models.patching import patch

    if device is not None:
        model.to(device)
    return patch(model.eval(), backend=backend)


def _upstream(name: str) -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{_package(error)} is not installed: pip install 'deformops-models[transformers]'"
        ) from error
    return getattr(transformers, name)


@contextmanager
def _one_error(source: str, row: Checkpoint | None, upstream_kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Turns what upstream raises for a missing, unreachable or damaged checkpoint into one CheckpointError."""
    name = f"{row.alias} ({source})" if row else source
    local = Path(source).is_dir()
    if not local and not upstream_kwargs.get("local_files_only"):
        _reach_hub(source, name, upstream_kwargs.get("cache_dir"))
    try:
        yield
    except CheckpointError:
        raise
    # A damaged config or file makes upstream and its readers raise anything.
    except Exception as error:
        reason = _first_line(error)
        if local or not isinstance(error, OSError):
            raise CheckpointError(f"cannot load {source}: {reason}") from error
        note = f"; {row.note}" if row and row.note else ""
        raise CheckpointError(
            f"cannot load {name} from the Hub or its cache: {reason.rstrip('.')}{note}. {_elsewhere(source)}"
        ) from error


def _elsewhere(source: str) -> str:
    return (
        f"Without a connection, run `hf download {source}` on another machine and pass that folder, or copy its Hub "
        "cache here and set HF_HUB_OFFLINE=1"
    )


def _reach_hub(source: str, name: str, cache_dir: str | Path | None) -> None:
    """Raises at once where nothing is cached and the Hub does not answer; upstream would try for half a minute."""
    import huggingface_hub
    from huggingface_hub import constants

    cached = huggingface_hub.try_to_load_from_cache(source, "config.json", cache_dir=cache_dir)
    # Behind a proxy there is no direct way to try.
    if cached or constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return
    host = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((host.hostname, host.port or (80 if host.scheme == "http" else 443)), 10).close()
    except OSError as error:
        raise CheckpointError(
            f"cannot load {name}: the Hub cannot be reached ({error}). {_elsewhere(source)}"
        ) from error


def _prepare_mmdet() -> None:
    """Imports mmdet, with the stand-in for mmcv's compiled operators where there are none."""
    from deformops_models.patches import mmcv_lite

    try:
        mmcv_lite.install()
        import mmdet.models  # noqa: F401
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{_package(error)} is not installed: pip install 'deformops-models[mmdet]'") from error


def _mmdet_config(name: str) -> Path:
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
    expected = re.search(r"-([0-9a-f]{8})\.(?:pth|safetensors)$", path.name)
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
        raise CheckpointError(f"cannot read {path}: {_first_line(error)}") from error
    state = content.get("state_dict", content) if isinstance(content, dict) else None
    if not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(f"{path} holds no state dict")
    return {key.removeprefix("module."): value for key, value in state.items()}, content.get("meta", {})


def _build(config: Any) -> nn.Module:
    from mmdet.registry import MODELS
    from mmengine.model import revert_sync_batchnorm
    from mmengine.registry import init_default_scope

    init_default_scope("mmdet")
    # Building writes into its argument, and the model keeps a config that can be built again.
    return revert_sync_batchnorm(MODELS.build(copy.deepcopy(config.model)))


def _dataset_meta(config: Any, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns classes and palette as the checkpoint has them, else as the config's test data set has them."""
    from mmdet.registry import DATASETS

    dataset = DATASETS.build({**copy.deepcopy(config.test_dataloader.dataset), "lazy_init": True})
    saved = {key.lower(): value for key, value in meta.get("dataset_meta", {}).items()}
    # Checkpoints from before mmdet 3 have the classes alone.
    old = {"classes": meta["CLASSES"]} if "CLASSES" in meta else {}
    return {"palette": "random", **dataset.metainfo, **old, **saved}


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
            raise CheckpointError(message + "; strict=False loads what fits")
        warnings.warn(message, stacklevel=3)
