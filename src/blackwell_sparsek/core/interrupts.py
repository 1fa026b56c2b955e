"""Ctrl-C while the command line is importing, which takes seconds, needs no traceback.

Only the command line: a program that imports this package keeps Python's handler, and so does a
command once its imports are done.
"""

import os
import signal
import sys
import threading

_COMMANDS = ("bsk", "bsk.exe")
_quiet = False


def end_quietly() -> None:
    """Let SIGINT end the process at once, if this is `bsk` or `python -m` of this package."""
    global _quiet
    # while `python -m` looks for the module and imports the packages around it, argv[0] is "-m"
    started_as = sys.argv[0] if getattr(sys, "argv", None) else ""
    if started_as != "-m" and os.path.basename(started_as) not in _COMMANDS:
        return
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _quiet = True


def imports_late() -> bool:
    """Whether this is `bsk`, which imports torch after it has understood its arguments."""
    if os.path.basename(sys.argv[0] if getattr(sys, "argv", None) else "") in _COMMANDS:
        return True
    return list(sys.orig_argv[1:3]) == ["-m", __name__.split(".")[0]]


def ends_quietly() -> bool:
    """Whether SIGINT ends this process at once: a command is importing what it needs."""
    return _quiet


def raise_again() -> None:
    """Undo `end_quietly`: SIGINT raises KeyboardInterrupt."""
    global _quiet
    if _quiet:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _quiet = False


# at its import, because the imports that follow are what takes long
end_quietly()
