"""`python -m blackwell_sparsek` is `bsk`."""

import sys


def main() -> int:
    """Run the command line; 130 if it is interrupted, also while it is importing."""
    try:
        from .bench.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
