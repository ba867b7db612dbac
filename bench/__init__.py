"""Benchmarks and experiments for the NGN optimizers: the package behind `ngn-bench`."""
