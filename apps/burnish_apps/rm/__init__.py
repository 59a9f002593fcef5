"""Reward models."""
