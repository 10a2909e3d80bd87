"""Pipeline schedules as data: built, lowered, validated, simulated and drawn without torch."""
