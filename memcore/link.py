"""A scenario in a URL: versioned, compressed, checked when it is read back.

``1.<base64url of zlib of JSON>``. Only the normalised scenario travels: no free text, no file name. The convention is
always named.
"""

import base64
import binascii
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memcore.errors import UserError
from memcore.i18n import gettext as _
from memcore.scenario import Scenario, parse_scenario, scenario_data

VERSION = "1"
MAX_LINK_CHARS = 4_096
# A link of 4,096 characters that holds more JSON than this was made to fill the memory.
MAX_JSON_BYTES = 200_000
MAX_IGNORED = 8

# Words that most scenarios hold; zlib refers back to them instead of spelling them out. Part of the format:
# changing it needs a new version.
_DICTIONARY = (
    b'"workload":{"micro_batch":"seq_len":"grad_accum":"attention":"checkpointing":"offload":{"optimizer":"cpu",'
    b'"parameters":"recipe":{"method":"lora","qlora","convention":"fsdp2_mixed","quantization":"nf4_double_quant",'
    b'"targets":["all-linear"],"rank":16,"engine_config":{"zero_optimization":{"reduce_bucket_size":"overlap_comm":true,'
    b'"hidden_act":"silu","attention_dropout":0.0,"tie_word_embeddings":false,"rope_theta":"rope_scaling":'
    b'"num_experts_per_tok":"num_key_value_heads":"max_position_embeddings":"sliding_window":"intermediate_size":'
    b'"num_attention_heads":"num_hidden_layers":"hidden_size":"vocab_size":"head_dim":"model_type":"config":'
    b'"parallelism":{"engine":"deepspeed","zero_stage":"dp_shard":"dp_replicate":1,"hardware":{"gpu":"A100-80GB",'
    b'"H100-80GB","gpus":8,"gpus_per_node":{"model":{"name":"meta-llama/Llama-3.1-8B","Qwen/Qwen3-"n_params":'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadLink:
    """What a link gave: a scenario, or None, and one sentence for each thing in it that was ignored."""

    scenario: Scenario | None
    ignored: tuple[str, ...] = ()


def write_link(scenario: Scenario) -> str:
    """The scenario as the text of a link. Raises UserError where it would not fit into 4,096 characters."""
    text = json.dumps(scenario_data(scenario), separators=(",", ":"))
    packer = zlib.compressobj(9, zdict=_DICTIONARY)
    packed = packer.compress(text.encode()) + packer.flush()
    link = f"{VERSION}.{base64.urlsafe_b64encode(packed).decode().rstrip('=')}"
    if len(link) > MAX_LINK_CHARS:
        message = _("The scenario makes a link of {size:,} characters, and {limit:,} is the most: share it as JSON.")
        raise UserError(message.format(size=len(link), limit=MAX_LINK_CHARS))
    return link


def read_link(link: str) -> ReadLink:
    """The scenario of a link. A field that cannot be used is left at its default and said; a link that is
    junk, of another version or without a usable model gives no scenario and one sentence."""
    try:
        data = _unpack(link)
    except UserError as error:
        return ReadLink(scenario=None, ignored=(str(error),))
    ignored: list[str] = []
    while len(ignored) < MAX_IGNORED:
        try:
            return ReadLink(scenario=parse_scenario(data), ignored=tuple(ignored))
        except UserError as error:
            ignored.append(str(error))
            if not _drop(data, error.field):
                break
    return ReadLink(scenario=None, ignored=tuple(ignored))


def _unpack(link: str) -> dict[str, Any]:
    version, _dot, packed = link[: MAX_LINK_CHARS + 1].partition(".")
    if len(link) > MAX_LINK_CHARS or not packed or not re.fullmatch("[0-9]+", version):
        raise UserError(_("The link is not one of this program's, or was cut off; it was ignored."))
    if version != VERSION:
        message = _("The link is of version {version}; this program reads version {own}. It was ignored.")
        raise UserError(message.format(version=version[:8], own=VERSION))
    try:
        unpacker = zlib.decompressobj(zdict=_DICTIONARY)
        text = unpacker.decompress(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)), MAX_JSON_BYTES)
        data = json.loads(text)
    except (ValueError, RecursionError, zlib.error, binascii.Error):
        raise UserError(_("The link is damaged; it was ignored.")) from None
    # A cut link can end just after its JSON, before its checksum.
    if not isinstance(data, dict) or not unpacker.eof:
        raise UserError(_("The link is damaged; it was ignored."))
    return data


def _drop(data: dict[str, Any], field: str) -> bool:
    """Take a field, or else the part that holds it, out of the data. False where nothing is left."""
    path = field.split(".")
    if not field or path[0] == "model":
        return False
    if field == "parallelism.dp":
        # The product is at fault, and its factors are what the link holds.
        ranks = [data["parallelism"].pop(name, None) for name in ("dp", "dp_shard", "dp_replicate")]
        return ranks != [None] * 3
    holder: Any = data
    for name in path[:-1]:
        holder = holder.get(name) if isinstance(holder, Mapping) else None
    if isinstance(holder, dict) and path[-1] in holder:
        del holder[path[-1]]
        return True
    return data.pop(path[0], None) is not None
