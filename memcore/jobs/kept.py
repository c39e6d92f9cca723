"""Answers that are kept, so that an equal question is not worked out again."""

from collections import OrderedDict

from memcore.jobs.results import Outcome


class KeptOutcomes:
    """The outcomes asked for most recently, bounded in number and in bytes."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[str, Outcome] = OrderedDict()

    def get(self, key: str) -> Outcome | None:
        """The outcome of that key, which thereby counts as asked for just now."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: str, outcome: Outcome) -> None:
        """Keep an outcome, and let go of those asked for longest ago where there are too many."""
        if key in self._entries:  # left by a flight that landed just as its last caller went
            return
        self._entries[key] = outcome
        self._num_bytes += len(outcome.reply)
        while len(self._entries) > self._max_entries or self._num_bytes > self._max_bytes:
            _key, dropped = self._entries.popitem(last=False)
            self._num_bytes -= len(dropped.reply)
