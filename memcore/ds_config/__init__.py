"""A user's ds_config.json: read, explained for the scenario, mended."""

from memcore.ds_config.effects import EFFECT_LABELS, ZERO_KEYS, Effect, KeyReading
from memcore.ds_config.reader import Reading, read_ds_config
from memcore.ds_config.text import MAX_DS_CONFIG_CHARS

__all__ = ["EFFECT_LABELS", "MAX_DS_CONFIG_CHARS", "ZERO_KEYS", "Effect", "KeyReading", "Reading", "read_ds_config"]
