"""The schedules, one file each, and the order of passes in both directions that two of them share."""
