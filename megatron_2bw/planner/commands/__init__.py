"""The commands ``plan``, ``estimate`` and ``profile``, which take Megatron's flags beside their own.

What they need is imported where they run, so that the other commands start at once.
"""
