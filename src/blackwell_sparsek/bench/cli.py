"""`bsk`, also `python -m blackwell_sparsek`: the command line of the package."""

import argparse
import sys
from collections.abc import Sequence

from ..core.compat import installed_versions
from ..core.errors import BskError
from .commands import bench, compare, info, precompile, profile, report, tune

COMMANDS = (bench, report, compare, profile, info, precompile, tune)


def parser() -> argparse.ArgumentParser:
    """All subcommands."""
    top = argparse.ArgumentParser(
        prog="bsk", description="Block-sparse products and attention for PyTorch."
    )
    top.add_argument(
        "--version", action="version", version=f"bsk {installed_versions()['blackwell_sparsek']}"
    )
    subparsers = top.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(subparsers)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: 0 on success, 1 for a negative result, 2 for invalid input or an OSError."""
    everything = parser()
    args = everything.parse_args(argv)
    if not hasattr(args, "run"):
        everything.print_help(sys.stderr)
        return 2
    try:
        status: int = args.run(args)
    except BskError as error:
        text = str(error)
        print(text if text.startswith("bsk ") else f"bsk: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `bsk ... | head`
        sys.stderr.close()
        return 1
    except OSError as error:  # such as a folder that cannot be written to
        where = f"{error.filename}: " if error.filename else ""
        print(f"bsk: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
