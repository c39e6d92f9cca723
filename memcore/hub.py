"""Fetch a model's config.json by its hub id. Runs in a worker process; only the JSON file, never code."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from memcore.errors import UserError
from memcore.i18n import gettext as _

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


def fetch_config(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of ``payload["hub_id"]``, as ``{"config": {...}}``.

    Raises UserError for what is not a hub id, and where the file cannot be had or read.
    """
    hub_id = str(payload["hub_id"]).strip()
    if not _HUB_ID.fullmatch(hub_id):
        message = _("{hub_id!r} is not a hub id: write owner/name, such as meta-llama/Llama-3.1-8B.")
        raise UserError(message.format(hub_id=hub_id[:60]))
    try:
        text = Path(hf_hub_download(hub_id, "config.json", etag_timeout=5)).read_text(encoding="utf-8-sig")
        config = json.loads(text)
    except Exception as error:
        message = _("The config of {hub_id} could not be fetched ({reason}): paste the file's text instead.")
        raise UserError(message.format(hub_id=hub_id, reason=type(error).__name__)) from None
    if not isinstance(config, dict):
        raise UserError(_("The config of {hub_id} is not a JSON object.").format(hub_id=hub_id))
    return {"config": config}
