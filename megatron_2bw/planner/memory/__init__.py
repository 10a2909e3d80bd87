"""Bytes that every stage of a layout needs."""
