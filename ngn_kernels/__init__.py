"""Drop-in PyTorch optimizers for the NGN step-size family, on fused kernels."""

from . import trainers
from .messages import SkippedStepError, SkippedStepWarning
from .optimizer import NGNOptimizer
from .optimizers import NGN, NGND, NGNM, DecNGNMDv1, NGNMDv1, NGNMDv1W, NGNMDv2, NGNMuon
from .parameter_groups import groups, muon_groups
from .version import __version__

__all__ = [
    "NGN",
    "NGND",
    "NGNM",
    "DecNGNMDv1",
    "NGNMDv1",
    "NGNMDv1W",
    "NGNMDv2",
    "NGNMuon",
    "NGNOptimizer",
    "SkippedStepError",
    "SkippedStepWarning",
    "__version__",
    "groups",
    "muon_groups",
    "trainers",
]


def __dir__() -> list[str]:
    """The public names; the modules behind them are internal."""
    return __all__
