"""Sources of rows: each a function that returns a list of them."""

from burnish_data.sources.arithmetic import arithmetic
from burnish_data.sources.gsm8k import gsm8k

__all__ = ["arithmetic", "gsm8k"]
