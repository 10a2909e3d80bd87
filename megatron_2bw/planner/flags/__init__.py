"""Megatron's flags: read from a command line or a launch script, and written for a layout."""
