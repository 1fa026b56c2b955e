"""`sparsify_` makes the linear layers of a model block-sparse; `input_norms` serves calibration."""

import sys
import time
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn as nn

from ..core.checks import check_choice, message
from ..core.errors import InvalidInput, InvalidType
from ..nn.bsr_linear import BSRLinear
from ..sparse.scores import METHODS, check_sparsity, choose_blocks
from ..sparse.validate import VALUE_DTYPES, check_block_shape


def _bytes_of(module: nn.Module) -> int:
    """Bytes of the parameters, and of the metadata of a block-sparse layer."""
    tensors: list[torch.Tensor] = [*module.parameters(), *module.buffers()]
    return sum(x.numel() * x.element_size() for x in tensors)


@dataclass(frozen=True)
class SparsifiedLayer:
    """One layer that `sparsify_` replaced: its blocks, and its memory, metadata included."""

    name: str
    shape: tuple[int, int]
    blocks: int
    nnz_blocks: int
    bytes_before: int
    bytes_after: int

    @classmethod
    def of(cls, name: str, linear: nn.Linear, layer: BSRLinear) -> "SparsifiedLayer":
        """Compare a layer with its replacement."""
        shape = (linear.out_features, linear.in_features)
        sizes = (_bytes_of(linear), _bytes_of(layer))
        return cls(name, shape, layer.blocks, layer.nnz_blocks, *sizes)

    @property
    def density(self) -> float:
        """Kept blocks over all blocks."""
        return self.nnz_blocks / max(1, self.blocks)


@dataclass(frozen=True)
class SparsifySummary:
    """The layers that `sparsify_` replaced, and why it skipped others. Prints as a table.

    Examples
    --------
    >>> from blackwell_sparsek.prune import sparsify_
    >>> summary = sparsify_(nn.Sequential(nn.Linear(64, 64)), 16, 0.75)
    >>> summary.layers[0].nnz_blocks, summary.bytes_before, summary.skipped
    (4, 16640, {})
    """

    layers: tuple[SparsifiedLayer, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """Kept blocks over all blocks of the replaced layers."""
        blocks = sum(layer.blocks for layer in self.layers)
        return sum(layer.nnz_blocks for layer in self.layers) / max(1, blocks)

    @property
    def bytes_before(self) -> int:
        """Memory of the layers before they were replaced."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Memory of the replaced layers now."""
        return sum(layer.bytes_after for layer in self.layers)

    def __str__(self) -> str:
        width = max([len(layer.name) for layer in self.layers], default=0)
        lines = [
            f"{layer.name:<{width}}  {layer.shape[0]} x {layer.shape[1]}  "
            f"{layer.nnz_blocks}/{layer.blocks} blocks  density {layer.density:.3f}"
            for layer in self.layers
        ]
        lines += [f"{name}: skipped, it {reason}" for name, reason in self.skipped.items()]
        lines.append(
            f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}, density {self.density:.3f}, "
            f"{self.bytes_before / 2**20:.2f} MiB -> {self.bytes_after / 2**20:.2f} MiB"
        )
        return "\n".join(lines)


def sparsify_(
    model: nn.Module,
    block_shape: int | tuple[int, int],
    sparsity: float,
    *,
    method: str = "magnitude",
    include: str | Iterable[str] = "*",
    exclude: str | Iterable[str] = (),
    calibration: Iterable[Any] | None = None,
) -> SparsifySummary:
    """Replace the `torch.nn.Linear` layers of `model` by pruned `BSRLinear` layers, in place.

    Parameters
    ----------
    model : torch.nn.Module
        Create the optimizer afterwards, because pruning replaces parameters.
    block_shape : int or (bh, bw), outputs by inputs
    sparsity : float in [0, 1]
        Fraction of blocks to drop, the same in each layer. 0 drops nothing, as a start for
        `GradualPruner`.
    method : "magnitude" (L2 norm), "wanda" or "random"
    include, exclude : patterns of module names, such as "lm_head" or "*.mlp.*"
        As in a shell. A layer is replaced if any of `include` and none of `exclude` matches its
        name, or one of its names if it is used in several places. A pattern that matches no linear
        layer is an error.
    calibration : iterable of what `model` is called with
        For method "wanda": a Mapping gives keyword arguments, a tuple or list positional ones.

    Returns
    -------
    SparsifySummary
        What was done to each linear layer, and why some were skipped: by `include` and `exclude`,
        subclasses of Linear, adapters of PEFT, and layers with shared weights, with hooks or with a
        `forward` of their own, on which other code relies. Prints as a table.

    Raises
    ------
    InvalidInput
        If a pattern matches no layer, or `calibration` does not go with `method`; the model is then
        unchanged.

    Notes
    -----
    A module used in several places stays shared. The fused inference path of
    `torch.nn.TransformerEncoderLayer` is turned off where its layers are replaced. Activations for
    "wanda" are those of the dense model. Work over two seconds is reported on stderr.

    Examples
    --------
    >>> import torch
    >>> from blackwell_sparsek.prune import sparsify_
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    >>> summary = sparsify_(model, (16, 16), 0.75, exclude="2")
    >>> model[0]
    BSRLinear(in_features=64, out_features=128, block_shape=(16, 16), nnz_blocks=8, density=0.25, \
bias=True)
    >>> summary.density
    0.25
    """
    op = "sparsify_"
    block_shape = check_block_shape(op, block_shape)
    check_sparsity(op, sparsity)
    check_choice(op, "method", method, METHODS)
    if (calibration is not None) != (method == "wanda"):
        expected = "inputs of the model for method 'wanda', and only for that"
        got = f"method {method!r} and {'no ' if calibration is None else ''}calibration"
        raise InvalidInput(message(op, "calibration", "does not fit the method", expected, got))
    if not isinstance(model, nn.Module) or isinstance(model, nn.Linear):
        expected = "a module that holds the layers (BSRLinear.from_linear makes a single one)"
        raise InvalidType(message(op, "model", "has a wrong type", expected, type(model).__name__))

    included, excluded = _names(op, "include", include), _names(op, "exclude", exclude)
    layers, skipped = _select(op, model, included, excluded)
    norms = {}
    if calibration is not None:
        norms = input_norms(model, [names[0] for names in layers.values()], calibration)
    progress = Progress(op, len(layers))
    # All choices are made first, so that a layer that cannot be pruned leaves the model unchanged.
    kept = []
    for linear, names in layers.items():
        inputs = norms.get(names[0])
        if inputs is not None:
            inputs = inputs.to(linear.weight.device)
        try:
            kept.append(choose_blocks(op, linear.weight, block_shape, sparsity, method, inputs))
        except InvalidInput as error:
            raise InvalidInput(f"{op}: layer {names[0]!r}: {error}") from error
        progress.advance(names[0])
    progress.finish()
    done = []
    for (linear, names), keep in zip(layers.items(), kept, strict=True):
        layer = BSRLinear._from_kept(linear, block_shape, keep)
        for name in names:
            _replace(model, name, layer)
        done.append(SparsifiedLayer.of(names[0], linear, layer))
    _leave_fused_paths(model)
    return SparsifySummary(tuple(done), skipped)


def _names(op: str, arg: str, names: str | Iterable[str]) -> list[str]:
    """One name, or several; the same for patterns of names."""
    found = [names] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    if wrong := [name for name in found if not isinstance(name, str)]:
        got = type(wrong[0]).__name__
        raise InvalidType(message(op, arg, "has a wrong type", "str or several of them", got))
    return found


def _select(
    op: str, model: nn.Module, include: list[str], exclude: list[str]
) -> tuple[dict[nn.Linear, list[str]], dict[str, str]]:
    """The layers to replace with all their names, and why others are skipped."""
    linears = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear)
    ]
    for arg, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name, _ in linears):
                problem = f"has the pattern {pattern!r}, which matches no linear layer"
                got = ", ".join(name for name, _ in linears[:5]) or "a model without any"
                raise InvalidInput(message(op, arg, problem, "names of linear layers", got))
    names_of: dict[nn.Linear, list[str]] = {}
    for name, module in linears:
        names_of.setdefault(module, []).append(name)
    layers: dict[nn.Linear, list[str]] = {}
    skipped: dict[str, str] = {}
    owners, adapters = _owners(model), _adapters(model)
    for module, names in names_of.items():
        if not _any_matches(names, include):
            skipped[names[0]] = "is not included"
        elif _any_matches(names, exclude):
            pattern = next(p for p in exclude if _any_matches(names, [p]))
            skipped[names[0]] = f"is excluded by {pattern!r}"
        elif module in adapters:
            skipped[names[0]] = "is part of an adapter"
        elif reason := _why_not(module, owners):
            skipped[names[0]] = reason
        else:
            layers[module] = names
    return layers, skipped


def _any_matches(names: list[str], patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _owners(model: nn.Module) -> dict[torch.Tensor, int]:
    """How many distinct modules hold each parameter."""
    counts: dict[torch.Tensor, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            counts[parameter] = counts.get(parameter, 0) + 1
    return counts


def _adapters(model: nn.Module) -> set[nn.Module]:
    """The layers of adapters for fine-tuning: small, and read by the layers of PEFT that own them.

    These layers of PEFT hold the layer of the model as `base_layer`, and name the children that
    are adapters.
    """
    return {
        layer
        for owner in model.modules()
        if isinstance(getattr(owner, "base_layer", None), nn.Module)
        for name, child in owner.named_children()
        if name in getattr(owner, "adapter_layer_names", ())
        for layer in child.modules()
    }


def _why_not(linear: nn.Linear, owners: dict[torch.Tensor, int]) -> str | None:
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__name__}, not a plain Linear"
    if any(owners[p] > 1 for p in linear.parameters(recurse=False)):
        return "shares a parameter with another module"
    if linear.weight.dtype not in VALUE_DTYPES:
        return f"has weights of {linear.weight.dtype}"
    hooks = (
        *(linear._forward_hooks, linear._forward_pre_hooks),
        *(linear._backward_hooks, linear._backward_pre_hooks),
    )
    of_parameters = (
        hook
        for p in linear.parameters(recurse=False)
        for hook in (p._backward_hooks, p._post_accumulate_grad_hooks)
    )
    if any(hooks) or any(of_parameters):
        return "has hooks"
    own = vars(linear).get("forward")
    # accelerate moves inputs and weights between devices so, and puts the usual one back
    if own is not None and getattr(own, "__func__", None) is not nn.Linear.forward:
        return "has a forward of its own"
    return None


def _replace(model: nn.Module, name: str, layer: BSRLinear) -> None:
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    setattr(parent, child, layer)


def _leave_fused_paths(model: nn.Module) -> None:
    """Turn off the fused inference path of torch's encoder, which reads dense weights directly."""
    for module in model.modules():
        if not any(isinstance(m, BSRLinear) for m in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            # Neither relu (1) nor gelu (2), so that torch does not take the fused path.
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def input_norms(
    model: nn.Module, names: Iterable[str], batches: Iterable[Any]
) -> dict[str, torch.Tensor]:
    """The L2 norm of each input feature of some layers over all samples, as `wanda` takes it.

    Parameters
    ----------
    model : torch.nn.Module
        Run in evaluation mode without gradients; its mode is restored.
    names : names of modules in `model`, such as `torch.nn.Linear` layers; a str is one name
        The first argument of each must be a Tensor [..., features].
    batches : iterable of what `model` is called with
        A Mapping gives keyword arguments, a tuple or list positional ones, anything else the only
        argument.

    Returns
    -------
    dict, name -> Tensor [features] float32 on the device of the layer's input
        Sums of squares are kept in float64 where the device has it, so long samples lose nothing.

    Raises
    ------
    InvalidInput
        If `batches` is empty, a name is unknown, or a named layer is never called.

    Examples
    --------
    >>> import torch
    >>> from blackwell_sparsek.prune import input_norms
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> input_norms(model, ["0"], [torch.tensor([[3.0, 1.0], [4.0, 0.0]])])
    {'0': tensor([5., 1.])}
    """
    if not isinstance(batches, Iterable) or isinstance(batches, torch.Tensor | Mapping):
        expected = "an iterable of batches, such as a list or a DataLoader"
        problem, got = "is not a sequence of batches", type(batches).__name__
        raise InvalidType(message("input_norms", "batches", problem, expected, got))
    squares: dict[str, torch.Tensor] = {}
    modules = _named(model, _names("input_norms", "names", names))

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            wide = torch.float32 if x.device.type == "mps" else torch.float64
            kind = torch.promote_types(x.dtype, torch.float32)
            rows = x.detach().reshape(-1, x.shape[-1])
            norms = torch.linalg.vector_norm(rows, dim=0, dtype=kind)
            square = norms.to(wide).square()
            squares[name] = squares[name] + square if name in squares else square

        return hook

    was_training = {module: module.training for module in model.modules()}
    handles = [
        module.register_forward_pre_hook(watch(name), with_kwargs=True)
        for name, module in modules.items()
    ]
    total = len(batches) if isinstance(batches, Sized) else None
    progress = Progress("calibration batches", total)
    try:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                _call(model, batch)
                progress.advance()
    finally:
        progress.finish()
        for handle in handles:
            handle.remove()
        for module, training in was_training.items():
            module.training = training
    missed = [name for name in modules if name not in squares]
    if missed:
        expected = "batches that reach every layer (exclude the others)"
        got = f"nothing for {', '.join(missed[:5])}{' ...' if len(missed) > 5 else ''}"
        problem = "did not reach some layers"
        raise InvalidInput(message("input_norms", "batches", problem, expected, got))
    return {name: square.sqrt().float() for name, square in squares.items()}


def _named(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    known = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in known:
            problem = f"has {name!r}, which is no module of the model"
            got = ", ".join([other for other in known if other][:5]) or "a model without any"
            raise InvalidInput(message("input_norms", "names", problem, "names of modules", got))
    return {name: known[name] for name in names}


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)


QUIET_SECONDS = 2.0
# A log file should not fill with lines; the line of a terminal may be rewritten often.
SECONDS_BETWEEN_LINES = 10.0
SECONDS_BETWEEN_UPDATES = 0.2


class Progress:
    """Report progress over items whose number may be unknown; silent for the first two seconds."""

    def __init__(self, what: str, total: int | None):
        self.what = what
        self.total = total
        self.done: int = 0
        self.started: float = time.monotonic()
        self.last: float = self.started + QUIET_SECONDS - SECONDS_BETWEEN_LINES
        self.shown: bool = False

    def advance(self, item: str = "") -> None:
        """Count one more item as done; `item` names it."""
        self.done += 1
        now = time.monotonic()
        rewrite = sys.stderr.isatty()
        pause = SECONDS_BETWEEN_UPDATES if rewrite else SECONDS_BETWEEN_LINES
        if now - self.started < QUIET_SECONDS or now - self.last < pause:
            return
        self.last = now
        self.shown = True
        of = "" if self.total is None else f"/{self.total}"
        line = f"{self.what}: {self.done}{of} after {now - self.started:.0f} s {item}"
        start, end = ("\r\033[K", "") if rewrite else ("", "\n")
        print(start + line.rstrip(), end=end, file=sys.stderr, flush=True)

    def finish(self) -> None:
        """End the line of progress."""
        if self.shown and sys.stderr.isatty():
            print(file=sys.stderr, flush=True)
