"""Schedules as data: pure Python, tested without torch."""
