"""Token ids in, completions with log-probs out. Importing this package imports no engine."""

from burnish_generation.replicas import Replicas
from burnish_generation.types import Completion, Engine, Sampling, WeightSource

__version__ = "0.1.0"

__all__ = ["Completion", "Engine", "Replicas", "Sampling", "WeightSource"]
