"""Counters that rest at zero: on the host; tests/gpu/test_decode.py has streams and graphs."""

import torch

from blackwell_sparsek.launch.launcher import recording, resting_words


def test_they_are_zero():
    words = resting_words(7, torch.device("cpu"))
    assert words.dtype == torch.int32 and words.tolist() == [0] * 7


def test_a_recording_knows_them():
    with recording() as record:
        words = resting_words(3, torch.device("cpu"))
    assert record.resting[0] is words
