"""Seconds of kernels, transfers and updates, from the sizes of a layout and the speeds of a machine."""
