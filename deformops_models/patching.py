"""Swapping the deformable attention of a built model, and the losses, in place by changing each module's class.

A patched class is a subclass of the upstream class that adds nothing but a forward, so parameters, hooks, training
flag, object identity, `state_dict` and checkpoints stay what they were. Knows no framework by name: the rows of
`Family` in patches/ say which classes there are, and a subclass of `Family` may swap something else than a class.
"""

import contextlib
import copyreg
import difflib
import functools
import importlib
import importlib.metadata
import inspect
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deformops_models.backend import Backend, as_backend, call_counts, interpreting, resolve

Filter = Callable[[nn.Module, str], bool]

#: What `patch` swaps: Deformable DETR's "loss" contains its matcher, Mask2Former's are two modules.
PARTS = ("attention", "matcher", "loss", "mask_predictor")


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
        framework: distribution that holds the class, as "transformers"; None for a class that many projects copied.
        module, class_name: where the class is; without a module, any class of this name whose forward has these
            parameters.
        adapter: subclass of `PatchedModule` with the new forward.
        parameters: names of upstream's forward parameters that the adapter was written for.
        part: of the training step, one of `PARTS`.
        steps: methods of upstream that the adapter no longer calls, so that nobody may have changed them.
        optional: those of `parameters` that other versions of the class lack.
    """

    name: str
    framework: str | None
    module: str | None
    class_name: str
    adapter: type[PatchedModule] | Callable
    parameters: tuple[str, ...]
    part: str = "attention"
    steps: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def mismatch(self, cls: type[nn.Module]) -> str | None:
        """Why the adapter does not fit this version of the class, or None."""
        found = tuple(inspect.signature(cls.forward).parameters)[1:]
        if found != tuple(name for name in self.parameters if name in found or name not in self.optional):
            return f"unknown signature: forward({', '.join(found)}), known is forward({', '.join(self.parameters)})"
        base = _known_base(cls)
        if changed := [step for step in self.steps if getattr(cls, step, None) is not getattr(base, step, self)]:
            return f"it has methods of its own or lacks them: {', '.join(changed)}"
        for method in ("forward", *self.steps) if self.module else ():
            if strange := foreign_code(getattr(cls, method), self.module):
                return f"its class's {method} was replaced by one of {strange}"
        return None

    def is_patched(self, module: nn.Module) -> bool:
        return isinstance(module, PatchedModule)

    def obstacle(self, module: nn.Module) -> str | None:
        """Why a module of this class must be left alone, or None."""
        cls = type(module)
        if has_foreign_forward(module):
            return "its forward was replaced on the instance"
        if isinstance(module, PatchedModule):
            return None
        if any(base.__name__ == "FSDPModule" for base in cls.__mro__):
            return "FSDP owns it: patch before fully_shard"
        for method in ("method", "decoder_method"):
            if getattr(module, method, None) == "discrete":
                return f"{method}='discrete' samples whole pixels"
        if replaced := [step for step in self.steps if step in vars(module)]:
            return f"replaced on the instance: {', '.join(replaced)}"
        return self.mismatch(cls)

    def swap(self, module: nn.Module) -> None:
        _swap(module, patched_class(type(module), self))

    def hold(self, module: nn.Module) -> str | None:
        """Why a patched module cannot be given back, or None."""
        if type(module) not in _patched_classes.values():
            return f" is now a {type(module).__name__}, which is not ours to change"
        if has_foreign_forward(module):
            return ": its forward was replaced on the instance and may call the patched one"
        return None

    def restore(self, module: nn.Module) -> None:
        _swap(module, type(module).upstream)


@dataclass(frozen=True)
class Entry:
    """One module of a report. `reason` says why it was left alone, `backend` what a swapped one will run."""

    name: str
    class_name: str
    family: str | None = None
    reason: str | None = None
    backend: str | None = None
    part: str = "attention"

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
    names = ("transformers", "transformers_losses", "mmcv", "ms_deform_attn")
    rows = [importlib.import_module(f"deformops_models.patches.{name}").FAMILIES for name in names]
    return tuple(family for row in rows for family in row)


def check_family(family: Family) -> str | None:
    """Why this family cannot be patched in this environment, or None. Imports the upstream module."""
    if family.module is None:
        return None
    try:
        upstream = getattr(importlib.import_module(family.module), family.class_name)
    except (ImportError, AttributeError) as error:
        # Another package that this one needs; upstream may raise its own error, without a name.
        other = isinstance(error, ModuleNotFoundError) and error.name
        if other and not f"{family.module}.".startswith(f"{other}."):
            return f"cannot be imported: it needs {other}, which is not installed"
        return f"not found: {error}"
    # Another library's import can raise anything.
    except Exception as error:
        return f"cannot be imported: {type(error).__name__}: {error}"
    return family.mismatch(upstream)


def patch(
    model: nn.Module,
    *,
    backend: Backend | str | None = None,
    strict: bool = True,
    filter: Filter | None = None,
    parts: Collection[str] = PARTS,
) -> nn.Module:
    """Swaps every known module of the training step of `model` in place and returns `model`.

    The root itself may be such a module. Patching twice is patching once. On CPU and in float64 a patched attention
    runs upstream's own forward; the other parts are plain PyTorch and run everywhere.

    Args:
        model: a built model; its device and dtype may change later.
        backend: for every swapped attention; "eager" keeps upstream's forward, None lets the tensors decide.
        strict: raise if nothing was swapped, or no attention though it is among `parts`.
        filter: called as `filter(module, name)`; modules for which it returns False are left alone.
        parts: which of `PARTS` to swap; modules of the others are left alone.

    Raises:
        PatchError: `strict` and nothing matched; or a swap failed. The model is as it was before.
        ValueError: `backend` or one of `parts` is unknown.
    """
    with _swapping:
        _patch(model, as_backend(backend), strict, filter, parts)
    return model


# What a thread has planned with a model stays true until it is done; a filter may patch, too.
_swapping = threading.RLock()


def _patch(
    model: nn.Module, backend: Backend | None, strict: bool, filter: Filter | None, parts: Collection[str]
) -> dict[nn.Module, str]:
    """As `patch`; returns the modules that were not patched before, and their names."""
    _check_model(model)
    if isinstance(parts, str) or not isinstance(parts, Collection) or any(part not in PARTS for part in parts):
        raise ValueError(f"parts={parts!r}: give some of {', '.join(PARTS)} as a tuple")
    if filter is not None and not callable(filter):
        raise TypeError(f"filter is a {type(filter).__name__}: give a function of a module and its name")
    plan, patched_before, skipped, left_out = [], [], [], {}
    for name, module in model.named_modules():
        if (family := family_of(type(module))) is None:
            continue
        reason = family.obstacle(module)
        if reason is None and (choice := _left_out(module, name, family, filter, parts)):
            reason = choice
            if not family.is_patched(module):
                left_out[module] = reason
        if reason is not None:
            skipped.append(Entry(name, type(module).__name__, family.name, reason, part=family.part))
        else:
            (patched_before if family.is_patched(module) else plan).append((name, module, family))
    needed = {"attention"} & set(parts) or set(parts)
    if strict and not any(family.part in needed for _, _, family in (*plan, *patched_before)):
        raise PatchError(_nothing_matched(model, skipped, needed))
    done = {}
    try:
        for name, module, family in plan:
            family.swap(module)
            done[module] = name
    except Exception as error:
        for swapped in done:
            family_of(type(swapped)).restore(swapped)
        raise PatchError(f"{name or 'the root'}, a {type(module).__name__}, takes no patched class: {error}") from error
    _filtered.update(left_out)
    for _, module, _ in (*plan, *patched_before):
        _filtered.pop(module, None)
        _set_backend(module, backend)
    return done


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: a torch.nn.Module is expected")


def _left_out(
    module: nn.Module, name: str, family: Family, filter: Filter | None, parts: Collection[str]
) -> str | None:
    """Whose choice it is to leave a module alone, or None."""
    if family.part not in parts:
        return f"parts leave the {family.part} out"
    return "the filter left it out" if filter is not None and not filter(module, name) else None


def _set_backend(module: nn.Module, backend: Backend | None) -> None:
    module.__dict__.pop("deformops_backend", None)
    if backend is not None and isinstance(module, PatchedModule):
        module.__dict__["deformops_backend"] = backend


def unpatch(model: nn.Module) -> nn.Module:
    """Gives every patched module of `model` its upstream class back and returns `model`.

    Raises:
        PatchError: another library has put a class of its own on top of a patched module (FSDP2's `fully_shard`) or
            replaced its forward. The model is as it was before.
    """
    _check_model(model)
    with _swapping:
        _restore({m: name for name, m in model.named_modules()})
    return model


def _restore(modules: dict[nn.Module, str]) -> None:
    """Gives those that are patched their upstream class back."""
    families = {m: family for m in modules if (family := family_of(type(m))) and family.is_patched(m)}
    for module, family in families.items():
        if reason := family.hold(module):
            raise PatchError(f"{modules[module] or 'the root'}{reason}")
    for module, family in families.items():
        _set_backend(module, None)
        family.restore(module)


@contextlib.contextmanager
def patched(
    model: nn.Module,
    *,
    backend: Backend | str | None = None,
    strict: bool = True,
    filter: Filter | None = None,
    parts: Collection[str] = PARTS,
) -> Iterator[nn.Module]:
    """Patches `model` inside a with-block, with the arguments of `patch`; modules patched before stay so.

    Raises:
        PatchError: as `patch`; at the end of the block as `unpatch`, with the block's own error as its context.
    """
    _check_model(model)
    with _swapping:
        before = {m: m.__dict__.get("deformops_backend") for m in model.modules() if isinstance(m, PatchedModule)}
        swapped = _patch(model, as_backend(backend), strict, filter, parts)
    try:
        yield model
    finally:
        with _swapping:
            for module, backend in before.items():
                if isinstance(module, PatchedModule):
                    _set_backend(module, backend)
            _restore(swapped)


def report(model: nn.Module) -> Report:
    """Lists every module that could be patched: swapped and what it will run, or left alone and why."""
    _check_model(model)
    result = Report()
    for name, module in model.named_modules():
        cls = type(module)
        family = family_of(cls)
        if family is None:
            if base := _known_base(cls):
                reason = f"class {_full_name(cls)} has another forward than {_full_name(base)}"
                result.skipped.append(Entry(name, cls.__name__, None, reason, part=_family_named(base).part))
            elif _samples_offsets(module):
                reason = f"class {_full_name(cls)} is not known"
                result.skipped.append(Entry(name, cls.__name__, None, reason))
        elif family.is_patched(module):
            backend = _will_run(module) if family.part == "attention" else "plain PyTorch"
            if family.module is None:
                backend += (
                    f"; {_full_name(cls.upstream)} has a known name, signature and projections, and computes the same"
                )
            result.swapped.append(Entry(name, cls.__name__, family.name, backend=backend, part=family.part))
        else:
            reason = family.obstacle(module) or _filtered.get(module, "not patched")
            result.skipped.append(Entry(name, cls.__name__, family.name, reason, part=family.part))
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
    base = _known_base(cls)
    return _family_named(base) if base and cls.forward is base.forward else None


def _known_base(cls: type) -> type | None:
    """The first class among a class and its bases that has a family, of a known module if one has."""
    exact = (base for base in cls.__mro__ if (base.__module__, base.__qualname__) in _families_by_class())
    return next(exact, None) or next(filter(_family_named, cls.__mro__), None)


def _family_named(cls: type) -> Family | None:
    rows = _families_by_class()
    return rows.get((cls.__module__, cls.__qualname__)) or rows.get((None, cls.__name__))


def foreign_code(function: Callable | property | None, module: str) -> str | None:
    """The module of a function, or of a decorator on it, if it is neither of `module`'s package nor of torch."""
    # OpenMMLab's own decorators are mmengine's.
    known = {module.partition(".")[0], "torch", "mmengine"}
    while function is not None:
        function = getattr(function, "fget", function)  # of a property
        home = getattr(function, "__globals__", {}).get("__name__", type(function).__name__)
        if home.partition(".")[0] not in known:
            return home
        function = getattr(function, "__wrapped__", None)
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
        if family.module and name == f"Patched{family.class_name}":
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


def has_foreign_forward(module: nn.Module) -> bool:
    """Whether somebody has put another forward on the instance; accelerate's wrapper of its own is none."""
    return "forward" in module.__dict__ and not any(_is_own_forward(module, name) for name in _FORWARDS)


def _samples_offsets(module: nn.Module) -> bool:
    """Whether a module has the one child that every deformable attention has."""
    return "sampling_offsets" in dict(module.named_children())


def _nothing_matched(model: nn.Module, skipped: list[Entry], needed: Collection[str]) -> str:
    parts = "deformable attention" if "attention" in needed else " or ".join(p for p in PARTS if p in needed)
    lines = [f"no {parts or 'part'} was patched in {type(model).__name__}"]
    if skipped:
        lines += [f"  {entry}" for entry in skipped]
    else:
        known = [f"{family.module or 'any module'}.{family.class_name}" for family in families()]
        names = [family.class_name for family in families()]
        classes = {type(m): m for m in model.modules()}
        near = [_full_name(cls) for cls, m in classes.items() if _samples_offsets(m)]
        near += [_full_name(cls) for cls in classes if difflib.get_close_matches(cls.__name__, names, 1, 0.7)]
        lines.append(f"  nearest classes in the model: {', '.join(list(dict.fromkeys(near))[:5]) or 'none'}")
        lines.append(f"  known classes: {', '.join(dict.fromkeys(known))}")
    frameworks = dict.fromkeys(["torch", *(family.framework for family in families() if family.framework)])
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
