"""`python -m blackwell_sparsek` is `bsk`."""

import sys

from .bench.cli import main

sys.exit(main())
