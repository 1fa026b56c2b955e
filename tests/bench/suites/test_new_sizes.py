"""The suite of lengths never seen before: no call may have the length of an earlier one."""

import torch

from blackwell_sparsek.bench.suites import new_sizes as suite


def test_no_length_comes_twice(monkeypatch):
    seen = []

    def recorded(function, tokens):
        def call(q, *args, **kwargs):
            seen.append((q.requires_grad, tokens, q.shape[tokens]))
            return function(q, *args, **kwargs)

        return call

    monkeypatch.setattr(suite, "attention", recorded(suite.attention, -2))
    monkeypatch.setattr(suite, "attention_varlen", recorded(suite.attention_varlen, 0))
    for case in suite.new_sizes(tiny=True):
        contender = suite.PEERS[suite.OURS].prepare(case.build(torch.device("cpu")))
        contender.check(contender.run())
    assert len(seen) == len(set(seen)) > 20


def test_there_are_lengths_for_every_round():
    # a run that is checked and the three of the longest timing, of both kinds of training
    needed = 2 * (suite._WARM_UP + 4 * suite.LENGTHS + 1)
    assert needed <= suite._LONGEST - suite._SHORTEST
