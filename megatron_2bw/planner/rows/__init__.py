"""Predictions for files of configurations, one JSON object per line."""
