"""Measurements and their tables: a step, a training iteration, memory bandwidth, several ranks."""
