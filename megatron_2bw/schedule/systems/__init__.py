"""The schedules, one file each, and the order of passes in both directions that three of them share."""
