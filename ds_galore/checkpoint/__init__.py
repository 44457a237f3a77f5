"""Checkpoints: what they hold and how it is encoded."""
