"""A suggestion in words: what it reaches, and each change with its reason."""

from memcore.i18n import gettext as _
from memcore.i18n import mark, ngettext
from memcore.suggest.search import Change, GoalKind, Suggestion
from memcore.suggest.traffic import Traffic
from memcore.units import ByteUnit, format_bytes

GOAL_LABELS = {GoalKind.MEMORY: mark("Least memory"), GoalKind.SPEED: mark("Most speed that fits")}


def outcome(suggestion: Suggestion, unit: ByteUnit) -> str:
    """What the suggestion does to the peak, and whether it reaches the goal, in one or two sentences."""
    before, after = (format_bytes(each.peak_bytes, unit) for each in (suggestion.before, suggestion.after))
    if not suggestion.met:
        sentence = _(
            "Nothing that was tried surely fits: this takes the least, {after} at the peak instead of {before}."
        )
    elif not suggestion.changes:
        sentence = _("The present settings are the best of all that were tried: {before} at the peak.")
    elif suggestion.goal.kind is GoalKind.SPEED:
        sentence = _("The fastest of all that surely fit: {after} at the peak instead of {before}.")
    elif suggestion.after.peak_bytes == suggestion.before.peak_bytes:
        sentence = _("Nothing that was tried takes less than the present {before} at the peak; this is faster.")
    else:
        sentence = _("The least of all that were tried: {after} at the peak instead of {before}.")
    return sentence.format(before=before, after=after)


def shown(value: int | bool) -> str:
    """A setting's value, sizes with separators."""
    return str(value).lower() if isinstance(value, bool) else f"{value:,}"


def reason(change: Change, suggestion: Suggestion, unit: ByteUnit) -> str:
    """Why a setting changes: what it buys beside the other changes, for the goal's sake first."""
    kept_peak, peak = change.peak_if_kept, suggestion.after.peak_bytes
    smaller = _("the peak is {size} smaller").format(size=format_bytes(kept_peak - peak, unit))
    if change.setting == "reduce_bucket_size" and change.now < _least(suggestion):
        return _("the bucket that was asked for")
    faster = _faster(change.traffic_if_kept, suggestion.traffic_after, unit)
    by_memory = [smaller] if kept_peak > peak else []
    memory_first = suggestion.goal.kind is GoalKind.MEMORY or not suggestion.met
    reasons = [*by_memory, *faster] if memory_first else [*faster, *by_memory]
    return reasons[0] if reasons else _("it belongs to the others")


def _least(suggestion: Suggestion) -> int:
    return suggestion.goal.least_bucket if suggestion.goal.kind is GoalKind.MEMORY else 1


def _faster(kept: Traffic, after: Traffic, unit: ByteUnit) -> list[str]:
    """The first count, in the order of speed, in which the suggestion is better than with the setting kept."""
    if kept <= after:
        return []
    if kept.exposed_bytes > after.exposed_bytes:
        size = format_bytes(kept.exposed_bytes - after.exposed_bytes, unit)
        return [_("{size} more is sent beside computation").format(size=size)]
    if kept.sent_bytes > after.sent_bytes:
        return [_("{size} less is sent").format(size=format_bytes(kept.sent_bytes - after.sent_bytes, unit))]
    if kept.launches > after.launches:
        fewer = kept.launches - after.launches
        return [ngettext("{count} fewer collective", "{count} fewer collectives", fewer).format(count=f"{fewer:,}")]
    fewer = kept.updates - after.updates
    pieces = ngettext("{count} fewer piece of the update", "{count} fewer pieces of the update", fewer)
    return [pieces.format(count=f"{fewer:,}")]


def traffic_rows(suggestion: Suggestion, unit: ByteUnit) -> list[tuple[str, str, str]]:
    """What is compared, before and after: the peak, then what speed is judged by, in its order."""
    before, after = suggestion.traffic_before, suggestion.traffic_after
    peaks = suggestion.before.peak_bytes, suggestion.after.peak_bytes
    sizes = [
        (_("Peak per GPU"), *peaks),
        (_("Sent with nothing computed beside it"), before.exposed_bytes, after.exposed_bytes),
        (_("Sent per step, less what stays gathered"), before.sent_bytes, after.sent_bytes),
    ]
    counts = [
        (_("Collectives per step"), before.launches, after.launches),
        (_("Pieces of the optimizer's update"), before.updates, after.updates),
    ]
    return [
        *((label, format_bytes(now, unit), format_bytes(then, unit)) for label, now, then in sizes),
        *((label, f"{now:,}", f"{then:,}") for label, now, then in counts),
    ]
