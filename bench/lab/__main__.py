"""`python -m ngn_bench.lab`: the same command line as `ngn-bench`."""

from __future__ import annotations

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main())
