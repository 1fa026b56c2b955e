"""Ctrl-C while `bsk` is importing ends it without a traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from blackwell_sparsek.core import interrupts

SOURCE = Path(__file__).parents[2] / "src"
SLOW = "print('importing', flush=True)\nimport time\ntime.sleep(60)\n"
SCRIPT = "import sys\nfrom blackwell_sparsek.__main__ import main\nsys.exit(main())\n"


def interrupted(folder, *command):
    """Interrupt a command while it imports a module that never ends."""
    path = os.pathsep.join([str(folder), str(SOURCE)])
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        # tests that run in the background inherit that it is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
class TestCommands:
    def test_the_module(self, tmp_path):
        (tmp_path / "torch.py").write_text(SLOW)
        assert interrupted(tmp_path, "-m", "blackwell_sparsek", "info") == (-signal.SIGINT, "")

    def test_the_script(self, tmp_path):
        (tmp_path / "torch.py").write_text(SLOW)
        (tmp_path / "bsk").write_text(SCRIPT)
        assert interrupted(tmp_path, str(tmp_path / "bsk"), "info") == (-signal.SIGINT, "")

    def test_imports_of_the_command_line_itself(self, tmp_path):
        (tmp_path / "argparse.py").write_text(SLOW)
        run = "from blackwell_sparsek.__main__ import main; raise SystemExit(main())"
        (tmp_path / "torch.py").write_text("")
        script = "import sys; sys.modules['blackwell_sparsek'] = p = type(sys)('p'); "
        script += f"p.__path__ = [{str(SOURCE / 'blackwell_sparsek')!r}]; {run}"
        code, errors = interrupted(tmp_path, "-c", script)
        assert (code, errors) == (130, "")

    def test_other_programs_keep_their_traceback(self, tmp_path):
        (tmp_path / "torch.py").write_text(SLOW)
        _, errors = interrupted(tmp_path, "-c", "from blackwell_sparsek import attention")
        assert "KeyboardInterrupt" in errors


def test_the_handler_is_restored(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/bsk", "info"])
        interrupts.end_quietly()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
        interrupts.raise_again()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        # a handler of somebody else stays
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupts.end_quietly()
        interrupts.raise_again()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        monkeypatch.setattr(sys, "argv", ["train.py"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupts.end_quietly()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
