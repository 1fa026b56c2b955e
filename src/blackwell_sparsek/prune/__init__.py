"""Choosing which blocks of a model's weights to keep, and making layers of them."""

from .calibration import input_norms
from .gradual import GradualPruner, shrink_
from .schedule import CubicSchedule
from .scores import block_magnitude, wanda
from .sparsify import sparsify_
from .summary import SparsifiedLayer, SparsifySummary

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
