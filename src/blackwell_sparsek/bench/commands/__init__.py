"""The subcommands of `bsk`: the functions that `bench/arguments.py` names."""

import torch

from ...core.errors import InvalidInput


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
