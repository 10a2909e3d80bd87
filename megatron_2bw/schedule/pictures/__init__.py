"""Timelines as pictures and files, and measured runs beside simulated ones."""
