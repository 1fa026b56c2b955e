"""`bsk`, also `python -m blackwell_sparsek`: the command line of the package."""

import importlib
import sys
from collections.abc import Sequence

from ..core import interrupts
from ..core.errors import BskError
from .arguments import parser

_LONG = ("bench", "profile", "compile", "tune")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: 0 on success, 1 for a negative result, 2 for invalid input or an OSError."""
    everything = parser()
    args = everything.parse_args(argv)
    if not hasattr(args, "run"):
        everything.print_help(sys.stderr)
        return 2
    module, function = args.run.split(":")
    if "torch" not in sys.modules and args.command in _LONG:
        # the import takes seconds, in which a command would seem to hang
        print(f"bsk {args.command}: importing torch", file=sys.stderr, flush=True)
    run = getattr(importlib.import_module(f"{__package__}.commands.{module}"), function)
    interrupts.raise_again()
    try:
        status: int = run(args)
    except BskError as error:
        text = str(error)
        _complain(text if text.startswith("bsk ") else f"bsk: {text}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `bsk ... | head`
        sys.stderr.close()
        return 1
    except OSError as error:  # such as a folder that cannot be written to
        where = f"{error.filename}: " if error.filename else ""
        _complain(f"bsk: {where}{error.strerror or error}")
        return 2
    return status


def _complain(text: str) -> None:
    # imports torch, which help and mistakes in arguments do without
    from .report.tables import printable

    # files have the names that strangers gave them
    print("\n".join(map(printable, text.split("\n"))), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
