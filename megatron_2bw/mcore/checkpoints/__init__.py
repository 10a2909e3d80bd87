"""Checkpoints with several weight versions, of which none is there that is only half written."""
