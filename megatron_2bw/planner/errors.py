"""What the planner refuses."""


class PlanError(ValueError):
    """Input that makes no sense: names the field, its value, the rule and the nearest choice that keeps it."""
