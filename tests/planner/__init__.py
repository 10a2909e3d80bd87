"""The planner: pure Python, tested without torch."""
