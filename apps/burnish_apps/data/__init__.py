"""Looking at data before training on it: ``burnish data inspect``."""
