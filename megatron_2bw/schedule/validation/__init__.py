"""Proof that the Programs of all ranks work together."""
