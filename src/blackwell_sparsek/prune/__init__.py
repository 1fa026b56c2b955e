"""Selecting which blocks of a model's weights to keep, and creating layers from them."""

from ..sparse.scores import block_magnitude, wanda
from .gradual import CubicSchedule, GradualPruner, shrink_
from .sparsify import SparsifiedLayer, SparsifySummary, input_norms, sparsify_

__all__ = [
    "CubicSchedule",
    "GradualPruner",
    "SparsifiedLayer",
    "SparsifySummary",
    "block_magnitude",
    "input_norms",
    "shrink_",
    "sparsify_",
    "wanda",
]
