"""Checkpoints in transformers' format: local folders, and repos of the Hugging Face Hub."""

import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from deformops_models.backend import Backend
from deformops_models.hub import table
from deformops_models.hub.table import Checkpoint, CheckpointError, find_checkpoint

#: Upstream's classes by the model type that a config.json names; the first one where it names no class.
MODEL_CLASSES = {
    "mask2former": ("Mask2FormerForUniversalSegmentation",),
    "oneformer": ("OneFormerForUniversalSegmentation",),
    "deformable_detr": ("DeformableDetrForObjectDetection",),
    "grounding-dino": ("GroundingDinoForObjectDetection",),
    "mm-grounding-dino": ("MMGroundingDinoForObjectDetection",),
    "omdet-turbo": ("OmDetTurboForObjectDetection",),
    "rt_detr": ("RTDetrForObjectDetection",),
    "rt_detr_v2": ("RTDetrV2ForObjectDetection",),
    "d_fine": ("DFineForObjectDetection",),
    "deimv2": ("Deimv2ForObjectDetection",),
    "lw_detr": ("LwDetrForObjectDetection",),
    "rf_detr": ("RfDetrForObjectDetection", "RfDetrForInstanceSegmentation"),
    "pp_doclayout_v2": ("PPDocLayoutV2ForObjectDetection",),
    "pp_doclayout_v3": ("PPDocLayoutV3ForObjectDetection",),
    "pp_doclayout_v4": ("PPDocLayoutV4ForObjectDetection",),
}

#: Ends of the names of buffers that upstream makes from the config, or counts; older checkpoints lack them.
_COMPUTED = ("num_batches_tracked", "criterion.empty_weight", "points_scale")


class Transformers:
    """Loads any detector of transformers in `MODEL_CLASSES`, patched; its config says which."""

    #: The only model type that is loaded; None loads all.
    model_type: ClassVar[str | None] = None
    processor_class: ClassVar[str] = "AutoProcessor"
    #: `size` of the processor where a metric's input size is not known; None keeps the repo's own.
    eval_size: ClassVar[Mapping[str, int] | None] = None

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        backend: Backend | str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        strict: bool = True,
        ignore_mismatched_sizes: bool = False,
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
            strict: parameters and buffers that the checkpoint does not hold are an error; otherwise upstream
                initialises and reports them.
            ignore_mismatched_sizes: parameters of another shape than the config asks for start anew; otherwise they
                are an error.
            upstream_kwargs: for upstream's `from_pretrained`: revision, cache_dir, local_files_only, token, ...

        Raises:
            CheckpointError: the name is unknown, the checkpoint is of another model type or lacks weights, the Hub
                cannot be reached and its cache does not hold the files, a file cannot be read, or the model has
                nothing to patch.
            ValueError: dtype, backend or device is not known.
        """
        _upstream("AutoConfig")
        backend, device = table.target(backend, device)
        if upstream_kwargs.get("output_loading_info"):
            raise TypeError(
                "output_loading_info=True: what a checkpoint lacks is an error here, or logged if not strict"
            )
        source, row = cls._locate(name_or_path)
        if dtype is not None:
            upstream_kwargs["dtype"] = dtype if dtype == "auto" else table.as_dtype(dtype)
        ours = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        with _one_error(source, row, upstream_kwargs):
            upstream = cls._model_class(source, upstream_kwargs)
            model, loaded = upstream.from_pretrained(source, **upstream_kwargs | ours)
        if loaded["mismatched_keys"] and not ignore_mismatched_sizes:
            name, held, asked = min(loaded["mismatched_keys"])
            raise CheckpointError(
                f"cannot load {source}: it holds {name} with shape {tuple(held)}, its config asks for {tuple(asked)}: "
                "correct the config, or pass ignore_mismatched_sizes=True to start such parameters anew"
            )
        own = dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
        missing = sorted(key for key in loaded["missing_keys"] if key in own and not key.endswith(_COMPUTED))
        if missing and strict:
            raise CheckpointError(
                f"{source} lacks {len(missing)} weights of {upstream.__name__}, such as {missing[0]}: it holds "
                "another model's weights, or pass strict=False to start them anew"
            )
        return table.ready(model, backend, device)

    @classmethod
    def processor(cls, name_or_path: str | Path, size: str = "eval", **upstream_kwargs: Any) -> Any:
        """Returns the upstream image processor.

        Args:
            name_or_path: as in `from_pretrained`.
            size: "eval" resizes to what the published metric was measured at (where that is not known, Mask2Former and
                Deformable DETR to a short edge of 800 and a long edge of at most 1333, others as "hub"); "hub" keeps
                the repo's or folder's own setting, which squashes to 384x384 in most Mask2Former repos.
            upstream_kwargs: for upstream's `from_pretrained`.

        Raises:
            CheckpointError: as `from_pretrained`.
        """
        if size not in ("eval", "hub"):
            raise ValueError(f'size is {size!r}: use "eval" or "hub"')
        upstream = _upstream(cls.processor_class)
        source, row = cls._locate(name_or_path)
        held = source in map(str, table.SHIPPED.values())  # made for one size
        if size == "eval" and not held and (known := (row and row.eval_size) or cls.eval_size):
            upstream_kwargs["size"] = dict(known)
        names = ("preprocessor_config.json", "processor_config.json")
        # An automatic class needs a file that names one.
        folder = Path(source, upstream_kwargs.get("subfolder") or "")
        if cls.model_type and Path(source).is_dir() and not any((folder / name).is_file() for name in names):
            return upstream(**upstream_kwargs)
        with _one_error(source, row, upstream_kwargs):
            return upstream.from_pretrained(source, **upstream_kwargs)

    @classmethod
    def _locate(cls, name_or_path: str | Path) -> tuple[str, Checkpoint | None]:
        """Returns the folder or Hub repo id to load from, and the row of checkpoints.toml if there is one."""
        table.check_name(name_or_path)
        name = table.local_name(str(name_or_path))
        if Path(name).expanduser().is_dir():
            return str(Path(name).expanduser()), None
        row = table.find(name)
        if row is None and (isinstance(name_or_path, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1):
            raise CheckpointError(f"no such folder: {name}")
        if row is None and "/" in name:
            return name, None
        row = row or find_checkpoint(name)
        if row.framework != "transformers" or cls.model_type not in (None, row.model_type):
            loader = "deformops_models" if row.loader == "Transformers" else row.loader
            raise CheckpointError(
                f"{row.alias} is a {row.model_type} checkpoint of {row.framework}: use {loader}.from_pretrained"
            )
        return row.repo_id, row

    @classmethod
    def _model_class(cls, source: str, kwargs: Mapping[str, Any]) -> Any:
        config, _ = _upstream("PreTrainedConfig").get_config_dict(source, **kwargs)
        found = config.get("model_type")
        problem = f"its config.json says model_type {found!r}" if config else "it holds no config.json"
        if cls.model_type not in (None, found):
            raise CheckpointError(f"{source} is no {cls.model_type} checkpoint: {problem}")
        if not isinstance(found, str) or found not in MODEL_CLASSES:
            raise CheckpointError(f"{source} cannot be loaded: {problem}; known are {', '.join(MODEL_CLASSES)}")
        known, named = MODEL_CLASSES[found], config.get("architectures") or ()
        return _upstream(next((name for name in known if name in named), known[0]))


class Mask2Former(Transformers):
    """Loads transformers' `Mask2FormerForUniversalSegmentation`, patched."""

    model_type = "mask2former"
    processor_class = "Mask2FormerImageProcessor"
    eval_size: ClassVar[Mapping[str, int]] = {"shortest_edge": 800, "longest_edge": 1333}


class DeformableDETR(Transformers):
    """Loads transformers' `DeformableDetrForObjectDetection`, patched."""

    model_type = "deformable_detr"
    processor_class = "DeformableDetrImageProcessor"
    eval_size: ClassVar[Mapping[str, int]] = {"shortest_edge": 800, "longest_edge": 1333}


def _upstream(name: str) -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise CheckpointError(
            f"{table.package(error)} is not installed: pip install 'deformops-models[transformers]'"
        ) from error
    if not hasattr(transformers, name):
        raise CheckpointError(f"transformers {transformers.__version__} has no {name}: install a newer one")
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
        reason = table.first_line(error)
        if local or not isinstance(error, OSError):
            raise CheckpointError(f"cannot load {source}: {reason}") from error
        note = f"; {row.note}" if row and row.note else ""
        raise CheckpointError(
            f"cannot load {name} from the Hub or its cache: {reason.rstrip('.')}{note}. {_elsewhere(source)}"
        ) from error


def _elsewhere(source: str) -> str:
    from huggingface_hub import constants

    offline = "" if constants.HF_HUB_OFFLINE else " and set HF_HUB_OFFLINE=1"
    return (
        f"Without a connection, run `hf download {source}` on another machine and pass that folder, or copy its Hub "
        f"cache here{offline}"
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
