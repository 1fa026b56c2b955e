import time

import torch

from blackwell_sparsek.bench.machine import ClockLog, parse_line

CPU = torch.device("cpu")


def test_lines_of_numbers_are_read_and_others_are_not():
    assert parse_line("1980, 612.25, 54\n") == {"sm_mhz": 1980, "watts": 612.25, "celsius": 54}
    assert parse_line("1980, [N/A], 54") is None
    assert parse_line("1980, 612.25") is None
    assert parse_line("") is None


def test_samples_between_two_moments_are_summed_up():
    with ClockLog(CPU) as log:
        assert log.between(0.0, 10.0) == {}
        for at, mhz in ((1.0, 100.0), (2.0, 300.0), (3.0, 200.0), (9.0, 900.0)):
            log.samples.append((at, {"sm_mhz": mhz, "watts": 1.0, "celsius": 2.0}))
        found = log.between(1.0, 3.0)
    assert found["sm_mhz"] == {"min": 100.0, "p50": 200.0, "max": 300.0}
    assert log.between(4.0, 8.0) == {}


def test_the_process_is_started_and_ended(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nwhile :; do echo 1500, 300, 40; sleep 0.05; done\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with ClockLog(torch.device("cuda", 0)) as log:
        for _ in range(200):
            if log.samples:
                break
            time.sleep(0.02)
        process = log._process
    assert log.samples[0][1] == {"sm_mhz": 1500.0, "watts": 300.0, "celsius": 40.0}
    assert process.poll() is not None
