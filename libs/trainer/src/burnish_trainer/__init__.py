"""The policy: forward, backward, step, log-probs and checkpoints, the same under any batching."""

from burnish_trainer.checkpoint import latest_checkpoint
from burnish_trainer.policy import Head, LossFunction, NonFiniteGradientError, Policy
from burnish_trainer.policy_group import PolicyGroup
from burnish_trainer.torch_policy import TorchPolicy

__version__ = "0.2.0"

__all__ = [
    "Head",
    "LossFunction",
    "NonFiniteGradientError",
    "Policy",
    "PolicyGroup",
    "TorchPolicy",
    "latest_checkpoint",
]
