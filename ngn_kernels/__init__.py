"""Drop-in PyTorch optimizers for the NGN step-size family, on fused kernels."""

from . import trainers
from .optimizer import NGNOptimizer, SkippedStepWarning
from .optimizers import NGN, NGND, NGNM, DecNGNMDv1, NGNMDv1, NGNMDv1W, NGNMDv2
from .version import __version__

__all__ = [
    "NGN",
    "NGND",
    "NGNM",
    "DecNGNMDv1",
    "NGNMDv1",
    "NGNMDv1W",
    "NGNMDv2",
    "NGNOptimizer",
    "SkippedStepWarning",
    "__version__",
    "trainers",
]
