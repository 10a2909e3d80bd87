"""The error that schedules raise."""


class ScheduleError(ValueError):
    """A schedule breaks a rule, or cannot be built as asked.

    Args:
        message: the value, the rule and the remedy.
        grid: text picture of the Programs with the place of the error marked, or empty.
    """

    def __init__(self, message: str, grid: str = "") -> None:
        super().__init__(f"{message}\n{grid}" if grid else message)
        self.message = message
        self.grid = grid
