"""The commands ``show``, ``schedules`` and ``validate``."""
