"""The optimizers that are timed: how each is built, which bytes it moves, whether it is right."""
