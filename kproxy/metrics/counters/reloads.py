"""Cells of reloads of the configuration. Refuses to know what a reload does."""


class ReloadCells:
    """Reloads of the configuration, by outcome."""

    def __init__(self, now_ns: int) -> None:
        self.outcomes = dict.fromkeys(("applied", "unchanged", "refused"), 0)
        self.last_successful = True  # the start counts as a reload
        self.loaded_ns = now_ns  # when the current settings were loaded

    def count(self, outcome: str, now_ns: int) -> None:
        self.outcomes[outcome] += 1
        self.last_successful = outcome != "refused"
        if self.last_successful:
            self.loaded_ns = now_ns
