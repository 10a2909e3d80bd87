"""Checkpoints with several weight versions; a half-written one is never left in place."""
