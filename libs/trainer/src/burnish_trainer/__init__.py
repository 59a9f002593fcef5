"""The policy: forward, backward, step, log-probs and checkpoints, the same under any batching."""

from burnish_trainer.checkpoint import latest_checkpoint
from burnish_trainer.policy import LossFunction, NonFiniteGradientError, Policy
from burnish_trainer.torch_policy import TorchPolicy

__version__ = "0.1.1"

__all__ = [
    "LossFunction",
    "NonFiniteGradientError",
    "Policy",
    "TorchPolicy",
    "latest_checkpoint",
]
