"""What the apps that learn from a fixed data set share: SFT, reward models, preferences."""
