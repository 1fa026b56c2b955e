"""The subcommands of `bsk`, and the types of arguments that they share.

Each module has `add_to(subparsers)` and the functions that its commands run.
"""

import argparse
import math

import torch

from ...core.errors import InvalidInput


def positive(text: str) -> int:
    """A whole number of at least 1, as the type of an option.

    Examples
    --------
    >>> positive("8")
    8
    """
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a whole number of 1 or more")
    return int(text)


def seconds(text: str) -> float:
    """A time of 0 or more, as the type of an option."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}; expected seconds, 0 or more")
    return value


def device_of(command: str, asked: str | None) -> torch.device:
    """The requested device, else the GPU if there is one, else the CPU."""
    has_gpu = torch.cuda.is_available()
    if asked is None:
        return torch.device("cuda" if has_gpu else "cpu")
    kind, _, index = asked.partition(":")
    if kind not in ("cpu", "cuda") or (":" in asked and not index.isdecimal()):
        raise InvalidInput(f"{command}: --device is {asked!r}; expected cpu or cuda")
    if kind == "cuda" and not has_gpu:
        raise InvalidInput(f"{command}: --device {asked}: torch finds no CUDA GPU here")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise InvalidInput(f"{command}: --device {asked}: there are {there} GPUs, from cuda:0 on")
    return torch.device(asked)
