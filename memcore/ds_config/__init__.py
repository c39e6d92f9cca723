"""A user's ds_config.json: read, explained for the scenario, mended."""

from memcore.ds_config.effects import ZERO_KEYS, Effect, KeyReading
from memcore.ds_config.reader import Reading, read_ds_config

__all__ = ["ZERO_KEYS", "Effect", "KeyReading", "Reading", "read_ds_config"]
