"""These tests need the extra [trainers] and packages.txt; `make test-trainers` installs both."""

from __future__ import annotations

import importlib.util

NEEDED = ("lightning", "litgpt", "pytorch_optimizer", "timm", "torchtitan")
INSTALLED = all(importlib.util.find_spec(name) for name in NEEDED)
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]
