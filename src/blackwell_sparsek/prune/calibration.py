"""What the inputs of linear layers look like on a sample of data."""

from collections.abc import Iterable, Mapping, Sized
from typing import Any

import torch
from torch import nn

from ..core.checks import message
from ..core.errors import InvalidInput, InvalidType
from .progress import Progress


def input_norms(
    model: nn.Module, names: Iterable[str], batches: Iterable[Any]
) -> dict[str, torch.Tensor]:
    """The L2 norm of each input feature of some layers, over all samples: what `wanda` takes.

    Parameters
    ----------
    model : torch.nn.Module
        Run in evaluation mode without gradients; its mode is restored.
    names : names of modules in `model`, such as of `torch.nn.Linear`
        The first argument of each must be a Tensor [..., features].
    batches : iterable of what `model` is called with
        A Mapping gives keyword arguments, a tuple or list positional ones, anything else the only
        argument.

    Returns
    -------
    dict, name -> Tensor [features] float32 on the device of the layer's input
        Sums of squares are kept in float64 where the device has it, so long samples lose nothing.

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
    names = list(names)

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            wide = torch.float32 if x.device.type == "mps" else torch.float64
            norms = torch.linalg.vector_norm(x.detach().flatten(0, -2), dim=0, dtype=torch.float32)
            square = norms.to(wide).square()
            squares[name] = squares[name] + square if name in squares else square

        return hook

    was_training = {module: module.training for module in model.modules()}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(watch(name), with_kwargs=True)
        for name in names
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
    missed = [name for name in names if name not in squares]
    if missed:
        expected = "batches that reach every layer (exclude the others)"
        got = f"nothing for {', '.join(missed[:5])}{' ...' if len(missed) > 5 else ''}"
        problem = "did not reach some layers"
        raise InvalidInput(message("input_norms", "batches", problem, expected, got))
    return {name: square.sqrt().float() for name, square in squares.items()}


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)
