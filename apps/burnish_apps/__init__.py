"""The reference apps. Each app's folder holds its loop (main), its config and its recipes."""

__version__ = "0.3.0"
