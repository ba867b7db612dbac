"""`python -m ngn_bench` is `ngn-bench`."""

import sys

from .cli import main

sys.exit(main())
