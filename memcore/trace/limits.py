"""What a trace refuses before it starts, and what it says of long sequences."""

from memcore.errors import UserError
from memcore.i18n import gettext as _

# A tensor of more bytes than torch can count (2**63) fails deep inside; no machine holds this many tokens a step.
MAX_TOKENS_PER_STEP = 2**28


def check_sizes(micro_batch: int, seq_len: int) -> None:
    """Raise UserError for a step without tokens, or with absurdly many."""
    for field, value in (("micro_batch", micro_batch), ("seq_len", seq_len)):
        if value < 1:
            message = _("workload.{field} is {value:,}; it must be 1 or more.")
            raise UserError(message.format(field=field, value=value), f"workload.{field}")
    if micro_batch * seq_len > MAX_TOKENS_PER_STEP:
        message = _("{tokens:,} tokens in one step are more than is traced ({most:,}).")
        raise UserError(message.format(tokens=micro_batch * seq_len, most=MAX_TOKENS_PER_STEP), "workload.seq_len")


def positions_notes(positions: int, has_table: bool, seq_len: int) -> list[str]:
    """A note where the sequence is longer than the `positions` that the model was made for.

    Raises UserError where it has a table of them: fake tensors would look beyond its end without a word.
    """
    if not 0 < positions < seq_len:
        return []
    if has_table:
        message = _("The model has a table of {positions:,} positions; a sequence of {tokens:,} tokens cannot run.")
        raise UserError(message.format(positions=positions, tokens=seq_len), "workload.seq_len")
    message = _("The sequence is longer than the {positions:,} positions that the config states.")
    return [message.format(positions=positions)]
