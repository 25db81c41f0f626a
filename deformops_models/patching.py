"""Swapping the deformable attention of a built model in place, by changing each module's class.

A patched class is a subclass of the upstream class that adds nothing but a forward, so parameters, hooks, training
flag, object identity, `state_dict` and checkpoints stay what they were. Knows no framework by name: the rows of
`Family` in patches/ say which classes there are.
"""

import contextlib
import copyreg
import difflib
import functools
import importlib
import importlib.metadata
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deformops_models.backend import Backend, as_backend, call_counts, interpreting, resolve

Filter = Callable[[nn.Module, str], bool]


class PatchError(RuntimeError):
    """Nothing could be patched, or a patch cannot be taken back."""


class PatchedModule:
    """Base of every patched class: chooses between the operators and upstream's own forward."""

    #: Set on each patched class.
    upstream: type[nn.Module]
    #: transformers' `kernelize` leaves a layer without a name alone, so that it does not undo the patch.
    kernel_layer_name = None
    #: The backend that `patch` was asked for; set on the instance.
    deformops_backend: Backend | None = None

    def runs_operator(self, tensor: Tensor) -> bool:
        """Whether this call goes to the operator; else it goes to upstream's forward and is counted as such."""
        # TorchScript and the classic ONNX exporter have no place for the operator.
        if _can_run(tensor, self.deformops_backend) and not torch.jit.is_tracing():
            return True
        if not torch.compiler.is_compiling():
            call_counts["upstream_forward"] += 1
        return False

    def __reduce_ex__(self, protocol):
        constructor, arguments, *state = super().__reduce_ex__(max(protocol, 2))
        ours = type(self) is _patched_classes.get(type(self).upstream)
        if ours and constructor is copyreg.__newobj__ and arguments == (type(self),):
            return (_new_patched, (type(self).upstream,), *state)
        return (constructor, arguments, *state)


def _can_run(tensor: Tensor, backend: Backend | None) -> bool:
    usable = tensor.is_cuda or (backend is Backend.TRITON and interpreting())
    return usable and backend is not Backend.EAGER and tensor.dtype != torch.float64


@dataclass(frozen=True)
class Family:
    """One upstream class and the forward that replaces its own.

    Args:
        name: of the model family, as in `model_type`.
        framework: distribution that holds the class, as "transformers".
        module, class_name: where the class is.
        adapter: subclass of `PatchedModule` with the new forward.
        parameters: names of upstream's forward parameters that the adapter was written for.
    """

    name: str
    framework: str
    module: str
    class_name: str
    adapter: type[PatchedModule]
    parameters: tuple[str, ...]

    def mismatch(self, cls: type[nn.Module]) -> str | None:
        """Why the adapter does not fit this version of the class, or None."""
        found = tuple(inspect.signature(cls.forward).parameters)[1:]
        if found == self.parameters:
            return None
        return f"unknown signature: forward({', '.join(found)}), known is forward({', '.join(self.parameters)})"


@dataclass(frozen=True)
class Entry:
    """One module of a report. `reason` says why it was left alone, `backend` what a swapped one will run."""

    name: str
    class_name: str
    family: str | None = None
    reason: str | None = None
    backend: str | None = None

    def __str__(self) -> str:
        return f"{self.name or '(root)'}: {self.class_name}: {self.reason or self.backend}"


@dataclass(frozen=True)
class Report:
    """What is swapped in a model and what was left alone, and why."""

    swapped: list[Entry] = field(default_factory=list)
    skipped: list[Entry] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.swapped)} modules patched, {len(self.skipped)} left alone"]
        lines += [f"  + {entry}" for entry in self.swapped]
        lines += [f"  - {entry}" for entry in self.skipped]
        return "\n".join(lines)


_patched_classes: dict[type, type] = {}
# Kept outside the modules, which stay as they were; only for `report`.
_filtered: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@functools.cache
def families() -> tuple[Family, ...]:
    """Every known upstream class. Imports no framework."""
    rows = [importlib.import_module(f"deformops_models.patches.{name}").FAMILIES for name in ("transformers", "mmcv")]
    return tuple(family for row in rows for family in row)


def check_family(family: Family) -> str | None:
    """Why this family cannot be patched in this environment, or None. Imports the upstream module."""
    try:
        upstream = getattr(importlib.import_module(family.module), family.class_name)
    except (ImportError, AttributeError) as error:
        return f"not found: {error}"
    return family.mismatch(upstream)


def patch(
    model: nn.Module,
    *,
    backend: Backend | str | None = None,
    strict: bool = True,
    filter: Filter | None = None,
) -> nn.Module:
    """Swaps every known deformable attention module of `model` in place and returns `model`.

    The root itself may be such a module. Patching twice is patching once. On CPU and in float64 a patched module
    runs upstream's own forward.

    Args:
        model: a built model; its device and dtype may change later.
        backend: for every swapped module; "eager" keeps upstream's forward, None lets the tensors decide.
        strict: raise if nothing was swapped.
        filter: called as `filter(module, name)`; modules for which it returns False are left alone.

    Raises:
        PatchError: `strict` and nothing matched; or a swap failed. The model is as it was before.
        ValueError: `backend` is unknown.
    """
    _patch(model, as_backend(backend), strict, filter)
    return model


def _patch(model: nn.Module, backend: Backend | None, strict: bool, filter: Filter | None) -> dict[nn.Module, str]:
    """As `patch`; returns the modules that were not patched before, and their names."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: patch takes a torch.nn.Module")
    plan, patched_before, skipped = [], [], []
    for name, module in model.named_modules():
        if (family := family_of(type(module))) is None:
            continue
        reason = _obstacle(module, family)
        if reason is None and filter is not None and not filter(module, name):
            reason = "the filter left it out"
            if not isinstance(module, PatchedModule):
                _filtered[module] = reason
        if reason is not None:
            skipped.append(Entry(name, type(module).__name__, family.name, reason))
        elif isinstance(module, PatchedModule):
            patched_before.append(module)
        else:
            plan.append((name, module, family))
    if strict and not plan and not patched_before:
        raise PatchError(_nothing_matched(model, skipped))
    done = {}
    try:
        for name, module, family in plan:
            _swap(module, patched_class(type(module), family))
            done[module] = name
    except Exception as error:
        for swapped in done:
            _swap(swapped, type(swapped).upstream)
        raise PatchError(f"{name or 'the root'}, a {type(module).__name__}, takes no patched class: {error}") from error
    for module in (*done, *patched_before):
        _filtered.pop(module, None)
        _set_backend(module, backend)
    return done


def _set_backend(module: nn.Module, backend: Backend | None) -> None:
    module.__dict__.pop("deformops_backend", None)
    if backend is not None:
        module.__dict__["deformops_backend"] = backend


def unpatch(model: nn.Module) -> nn.Module:
    """Gives every patched module of `model` its upstream class back and returns `model`.

    Raises:
        PatchError: another library has put a class of its own on top of a patched module (FSDP2's `fully_shard`) or
            replaced its forward. The model is as it was before.
    """
    _restore({m: name for name, m in model.named_modules()})
    return model


def _restore(modules: dict[nn.Module, str]) -> None:
    """Gives those that are patched their upstream class back."""
    modules = {m: name or "the root" for m, name in modules.items() if isinstance(m, PatchedModule)}
    for module, name in modules.items():
        if type(module) not in _patched_classes.values():
            raise PatchError(f"{name} is now a {type(module).__name__}, which is not ours to change")
        if _has_foreign_forward(module):
            raise PatchError(f"{name}: its forward was replaced on the instance and may call the patched one")
    for module in modules:
        _set_backend(module, None)
        _swap(module, type(module).upstream)


@contextlib.contextmanager
def patched(model: nn.Module, **options) -> Iterator[nn.Module]:
    """Patches `model` inside a with-block, with the options of `patch`; modules patched before stay so."""
    options = {"backend": None, "strict": True, "filter": None} | options
    options["backend"] = as_backend(options["backend"])
    before = {m: m.__dict__.get("deformops_backend") for m in model.modules() if isinstance(m, PatchedModule)}
    swapped = _patch(model, **options)
    try:
        yield model
    finally:
        for module, backend in before.items():
            if isinstance(module, PatchedModule):
                _set_backend(module, backend)
        _restore(swapped)


def report(model: nn.Module) -> Report:
    """Lists every deformable attention module of `model`: swapped and what it will run, or left alone and why."""
    result = Report()
    for name, module in model.named_modules():
        cls = type(module)
        family = family_of(cls)
        if isinstance(module, PatchedModule):
            result.swapped.append(Entry(name, cls.__name__, family.name, backend=_will_run(module)))
        elif family is not None:
            reason = _obstacle(module, family) or _filtered.get(module, "not patched")
            result.skipped.append(Entry(name, cls.__name__, family.name, reason))
        elif _samples_offsets(module):
            reason = f"class {_full_name(cls)} is not known"
            result.skipped.append(Entry(name, cls.__name__, None, reason))
    return result


def _will_run(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    if parameter is None:
        return "undecided: the module has no parameters"
    where = f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device}"
    if parameter.device.type == "meta":
        return "undecided: parameters are on meta"
    if not _can_run(parameter, module.deformops_backend):
        return f"upstream's own forward ({where})"
    try:
        dtype = parameter.dtype if parameter.dtype.is_floating_point else torch.float32
        backend = resolve(parameter.device, dtype, module.deformops_backend).backend
    except RuntimeError as error:
        return f"error: {error}"
    return f"upstream's own forward ({where})" if backend is Backend.EAGER else f"{backend} ({where})"


def family_of(cls: type) -> Family | None:
    """The family whose forward a class has, itself or by inheritance; None for a class that changed the forward."""
    if issubclass(cls, PatchedModule):
        cls = cls.upstream
    for base in cls.__mro__:
        if family := _families_by_class().get((base.__module__, base.__qualname__)):
            return family if cls.forward is base.forward else None
    return None


@functools.cache
def _families_by_class() -> dict[tuple[str, str], Family]:
    return {(family.module, family.class_name): family for family in families()}


def patched_class(upstream: type[nn.Module], family: Family) -> type[nn.Module]:
    """The patched subclass of an upstream class, the same object every time."""
    if cls := _patched_classes.get(upstream):
        return cls
    namespace = {
        "__module__": family.adapter.__module__,
        "__doc__": f"{upstream.__qualname__} on the operators of deformops_models.",
        "upstream": upstream,
    }
    cls = type(f"Patched{upstream.__name__}", (family.adapter, upstream), namespace)
    # Of two threads the first one's class is kept.
    return _patched_classes.setdefault(upstream, cls)


def importable(rows: tuple[Family, ...], module: str, name: str) -> type[nn.Module]:
    """`__getattr__` of a module in patches/: its patched classes by name, made when asked for."""
    for family in rows:
        if name == f"Patched{family.class_name}":
            return patched_class(getattr(importlib.import_module(family.module), family.class_name), family)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _new_patched(upstream: type[nn.Module]) -> nn.Module:
    """An empty instance for pickle and deepcopy to fill."""
    family = family_of(upstream)
    if family is None:
        raise PatchError(f"{upstream.__module__}.{upstream.__qualname__} cannot be patched in this version")
    cls = patched_class(upstream, family)
    return cls.__new__(cls)


def _swap(module: nn.Module, cls: type[nn.Module]) -> None:
    own = [name for name in _FORWARDS if _is_own_forward(module, name)]
    module.__class__ = cls
    for name in own:
        module.__dict__[name] = types.MethodType(cls.forward, module)


# accelerate keeps the bound forward that it wraps on the instance, as the second of these, and later as the first.
_FORWARDS = ("forward", "_old_forward")


def _is_own_forward(module: nn.Module, name: str) -> bool:
    """Whether the instance holds its class's own forward, bound to itself, under this name."""
    return module.__dict__.get(name) == types.MethodType(type(module).forward, module)


def _has_foreign_forward(module: nn.Module) -> bool:
    return "forward" in module.__dict__ and not any(_is_own_forward(module, name) for name in _FORWARDS)


def _obstacle(module: nn.Module, family: Family) -> str | None:
    """Why a module of a known class must be left alone, or None."""
    cls = type(module)
    if _has_foreign_forward(module):
        return "its forward was replaced on the instance"
    if isinstance(module, PatchedModule):
        return None
    if any(base.__name__ == "FSDPModule" for base in cls.__mro__):
        return "FSDP owns it: patch before fully_shard"
    if getattr(module, "method", "default") == "discrete":
        return "method='discrete' samples whole pixels"
    return family.mismatch(cls)


def _samples_offsets(module: nn.Module) -> bool:
    """Whether a module has the one child that every deformable attention has."""
    return isinstance(module._modules.get("sampling_offsets"), nn.Module)


def _nothing_matched(model: nn.Module, skipped: list[Entry]) -> str:
    lines = [f"no deformable attention was patched in {type(model).__name__}"]
    if skipped:
        lines += [f"  {entry}" for entry in skipped]
    else:
        known = [f"{family.module}.{family.class_name}" for family in families()]
        names = [family.class_name for family in families()]
        classes = {type(m): m for m in model.modules()}
        near = [_full_name(cls) for cls, m in classes.items() if _samples_offsets(m)]
        near += [_full_name(cls) for cls in classes if difflib.get_close_matches(cls.__name__, names, 1, 0.7)]
        lines.append(f"  nearest classes in the model: {', '.join(list(dict.fromkeys(near))[:5]) or 'none'}")
        lines.append(f"  known classes: {', '.join(dict.fromkeys(known))}")
    frameworks = dict.fromkeys(["torch", *(family.framework for family in families())])
    lines.append("  installed: " + ", ".join(f"{name} {_version(name)}" for name in frameworks))
    return "\n".join(lines)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _version(framework: str) -> str:
    """Version of a framework by its import name; a distribution of another name may hold it, as mmcv-lite does."""
    module = sys.modules.get(framework)
    if version := getattr(module, "__version__", None):
        return version
    for distribution in importlib.metadata.packages_distributions().get(framework, ()):
        return importlib.metadata.version(distribution)
    return "is not installed"
