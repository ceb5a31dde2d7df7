"""Helpers around a training loop."""
