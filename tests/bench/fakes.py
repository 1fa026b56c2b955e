"""Suites, cases and peers that compute nothing much, for tests of the frame."""

import torch

from blackwell_sparsek.bench.case import EAGER, Case, Contender, Peer, Suite

CPU = torch.device("cpu")


def contender(value=1.0, check=lambda out: None, **more):
    return Contender(lambda: torch.full((8,), value).sum(), check, 1e6, **more)


def peer(name, prepare=lambda inputs: contender(), **more):
    return Peer(name, f"label of {name}", prepare, **more)


def case(name="one", peers=("bsk", "other"), modes=(EAGER,), build=lambda device: "inputs"):
    return Case(name, {"length": 8, "heads": 2}, build, tuple(peers), 4e6, modes)


def suite(peers=None, cases=lambda tiny: [case()], name="fake", **more):
    everybody = peers or [peer("bsk"), peer("other", rival=True)]
    return Suite(name, "About it.", cases, {p.name: p for p in everybody}, "bsk", **more)
