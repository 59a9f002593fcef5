"""Group relative policy optimization."""
