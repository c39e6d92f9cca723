"""The answer as data for other programs: JSON and table rows, in whole bytes and unrounded numbers.

Keys carry their units. Nothing here is translated: these are identifiers, not sentences.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from memcore.alive import alive_by_module
from memcore.budget import Budget
from memcore.compare import beside_closed_form, closed_form
from memcore.ds_config import Reading
from memcore.ladder import Ladder
from memcore.models import Block, CatalogueModel, Inventory, Role, Tensor, catalogue_inventory, catalogue_model
from memcore.recipes import DType
from memcore.scenario import scenario_data
from memcore.terms import Phase, Term
from memcore.trace.profile import dump_profile
from memcore.zero import Communication


def budget_report(budget: Budget) -> dict[str, Any]:
    """The budget as JSON data, in bytes per GPU (the fullest rank).

    The terms' `bytes` add up to `peak_bytes`, and their `by_phase` to the budget's own `by_phase`. A term's
    formula explains `largest_bytes`, the most that it takes at any moment.
    """
    return {
        "scenario": scenario_data(budget.scenario),
        "peak_bytes": budget.peak_bytes,
        "binding_phase": budget.binding_phase.value,
        "binding_moment": budget.timeline[budget.peak_index].label,
        "verdict": budget.verdict.value,
        "error_band_percent": budget.band.percent,
        "error_band": "published_runs" if budget.band.earned else "assumed",
        "error_band_runs": budget.band.runs,
        "not_counted": [part.value for part in budget.missing],
        "static": {**asdict(budget.static), "total_bytes": budget.static.total_bytes},
        "ladder": _ladder(budget.ladder, budget),
        "by_phase": {phase.value: budget.totals[index] for phase, index in budget.phase_peaks().items()},
        "terms": [_term(term, budget) for term in budget.terms],
        "precision": {"label": budget.states.precision.label, "source": budget.states.precision.citation},
        "parameters": {
            "total": budget.states.n_params,
            "active": _active(budget),
            "trained": budget.states.trained,
            **_details(budget.inventory),
        },
        "communication": _communication(budget.communication, budget.states.n_params),
        "host_bytes_per_node": {
            "cpu": budget.host.cpu_bytes,
            "nvme": budget.host.nvme_bytes,
            "unified": budget.host.unified_bytes,
        },
        "defaults_filled": _copied(budget.evidence.config_defaults),
        "quantised_as": budget.evidence.quantised_as,
    }


def budget_rows(budget: Budget) -> list[dict[str, Any]]:
    """The budget as a table, for CSV: one row per term, with its bytes per GPU at the peak and at the peak of
    each phase. Each column of bytes adds up to the budget's figure."""
    peaks = budget.phase_peaks()
    return [
        {
            "name": term.name,
            "category": term.category.value,
            "bytes": term.at(budget.peak_index),
            **{f"{phase.value}_bytes": term.at(index) for phase, index in peaks.items()},
            "formula": term.formula.numbers,
            "evidence": term.evidence.value,
            "source": term.source,
        }
        for term in budget.terms
    ]


def inventory_report(inventory: Inventory) -> dict[str, Any]:
    """A counted model as JSON data: parameters in all, by role, by part and by block, and what is largest.

    `blocks` has one entry for all blocks of a module list that are alike; `numbers` are their indices, and None
    stands for a module outside such lists.
    """
    return {
        "model_class": inventory.model_class,
        "total": inventory.n_params,
        "active": inventory.n_active,
        **_details(inventory),
        "by_part": parameters_by_part(inventory),
        "bf16_bytes": inventory.n_params * DType.BF16.size,
        "layers": len(inventory.layers),
        "shapes": asdict(inventory.shapes),
        "blocks": block_kinds(inventory),
    }


def config_report(counted: Mapping[str, Any], inventory: Inventory) -> dict[str, Any]:
    """A counted config.json as JSON data: its inventory, the class defaults that counting filled in, by dotted
    name, and the method that its checkpoint is packed with, if any."""
    return {
        **inventory_report(inventory),
        "defaults_filled": dict(counted["defaults"]),
        "quantised_as": counted["quantised_as"],
    }


def model_report(name: str) -> dict[str, Any]:
    """A catalogue model as JSON data: published counts with their sources, and the inventory where there is one.

    Raises UserError with the nearest names for an unknown one.
    """
    model, inventory = catalogue_model(name), catalogue_inventory(name)
    return {
        **model_summary(model),
        "published_total": model.n_params,
        "published_total_precision": model.n_params_precision,
        "published_total_source": model.n_params_source,
        "published_active": model.n_active_params,
        "published_active_source": model.n_active_source,
        "config_source": model.config_source,
        "note": model.note,
        "inventory": None if inventory is None else inventory_report(inventory),
    }


def model_summary(model: CatalogueModel) -> dict[str, Any]:
    """A line of the catalogue. Parameters are the inventory's, else the published ones; `cross_checked` where
    both stand beside each other."""
    inventory = catalogue_inventory(model.name)
    return {
        "name": model.name,
        "family": model.family,
        "total": model.n_params if inventory is None else inventory.n_params,
        "active": model.n_active_params if inventory is None else inventory.n_active,
        "layers": None if inventory is None else len(inventory.layers),
        "cross_checked": inventory is not None and model.cross_checked,
    }


def parameters_by_part(inventory: Inventory) -> dict[str, int]:
    """Parameters of the text model, the vision tower and the projector between them, absent parts left out."""
    by_role = inventory.by_role()
    apart = {role.value: by_role[role] for role in (Role.VISION, Role.PROJECTOR) if role in by_role}
    return {"text": inventory.n_params - sum(apart.values()), **apart}


def block_kinds(inventory: Inventory) -> list[dict[str, Any]]:
    """Blocks that are alike, together, in module order: name, indices, parameters of each one, by role."""
    kinds: dict[tuple[str, tuple[Tensor, ...]], list[Block]] = {}
    for block in inventory.blocks:
        stem, _dot, number = block.name.rpartition(".")
        key = stem if number.isdigit() else block.name
        kinds.setdefault((key, block.tensors), []).append(block)
    return [
        {
            "name": stem,
            "numbers": _numbers(blocks) or None,
            "count": len(blocks),
            "decoder_layer": blocks[0].layer is not None,
            "parameters_each": blocks[0].numel,
            "by_role": _by_role(tensors),
        }
        for (stem, tensors), blocks in kinds.items()
    ]


def _numbers(blocks: list[Block]) -> list[int]:
    ends = [block.name.rpartition(".")[2] for block in blocks]
    return [int(end) for end in ends if end.isdigit()]


def _by_role(tensors: tuple[Tensor, ...]) -> dict[str, int]:
    sums = dict.fromkeys(Role, 0)
    for tensor in tensors:
        sums[tensor.role] += tensor.numel
    return {role.value: count for role, count in sums.items() if count}


def _ladder(ladder: Ladder, budget: Budget) -> dict[str, Any]:
    return {
        "allocated_bytes": ladder.allocated,
        "reserved_bytes": ladder.reserved,
        "reserved_evidence": ladder.reserved_evidence.value,
        "reserved_source": ladder.reserved_source,
        "runtime_bytes": ladder.runtime.largest,
        "runtime_evidence": ladder.runtime.evidence.value,
        "runtime_source": ladder.runtime.source,
        "device_bytes": ladder.device,
        "usable_bytes": ladder.usable,
        "usable_evidence": budget.device.usable_evidence.value,
        "usable_source": budget.device.usable_source,
    }


def _term(term: Term, budget: Budget) -> dict[str, Any]:
    peaks: dict[Phase, int] = budget.phase_peaks()
    return {
        "name": term.name,
        "category": term.category.value,
        "bytes": term.at(budget.peak_index),
        "largest_bytes": term.largest,
        "by_phase": {phase.value: term.at(index) for phase, index in peaks.items()},
        "formula": asdict(term.formula),
        "evidence": term.evidence.value,
        "source": term.source,
    }


def _active(budget: Budget) -> int | None:
    """Parameters that one token uses; None where only a count is known."""
    if budget.inventory is not None:
        return budget.inventory.n_active
    name = budget.scenario.model.name
    return None if name is None else catalogue_model(name).n_active_params


def _details(inventory: Inventory | None) -> dict[str, Any]:
    """What only shapes tell: None throughout for a bare count."""
    if inventory is None:
        return dict.fromkeys(("by_role", "largest_layer", "largest_tensor", "tied"))
    layer, (name, tensor) = inventory.largest_layer, inventory.largest_tensor
    return {
        "by_role": {role.value: count for role, count in inventory.by_role().items()},
        "largest_layer": {"name": layer.name, "parameters": layer.numel},
        "largest_tensor": {"name": name, "shape": list(tensor.shape), "parameters": tensor.numel},
        "tied": inventory.tied,
    }


def _communication(communication: Communication, n_params: int) -> dict[str, Any]:
    return {
        "bytes_per_gpu": communication.bytes_per_gpu,
        "volume_in_parameters": communication.volume_in_parameters(n_params),
        "link": {
            "name": communication.link_name,
            "bytes_per_s": communication.link_bytes_per_s,
            "source": communication.link_source,
        },
        "seconds": communication.seconds,
        "collectives": [
            {**asdict(collective), "bytes_per_gpu": collective.bytes_per_gpu}
            for collective in communication.collectives
        ],
    }


def _copied(defaults: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if defaults is None else dict(defaults)


def reading_report(reading: Reading) -> dict[str, Any]:
    """A ds_config's reading as JSON data: keys with their effect and cost in bytes, notes, the mended file, and
    the budget of the scenario that it makes."""
    return {
        "keys": [
            {
                "path": key.path,
                "given": key.given,
                "in_force": key.value,
                "effect": key.effect.value,
                "cost_bytes": key.cost_bytes,
                "why": key.why,
            }
            for key in reading.keys
        ],
        "costliest": [key.path for key in reading.costliest()],
        "notes": list(reading.notes),
        "unknown": list(reading.unknown),
        "corrected": dict(reading.corrected),
        "budget": budget_report(reading.budget),
    }


def trace_report(budget: Budget) -> dict[str, Any]:
    """A traced budget as JSON data, with the closed form's peaks by phase and the profile itself."""
    profile = budget.evidence.profile
    assert profile is not None, "a trace was asked for"
    pairs = beside_closed_form(budget)
    return {
        "trace": dump_profile(profile),
        "peak_bytes": budget.peak_bytes,
        "closed_form_peak_bytes": closed_form(budget).peak_bytes if pairs else None,
        "by_phase": [
            {
                "phase": pair.phase.value,
                "traced_bytes": pair.traced,
                "closed_form_bytes": pair.closed,
                "mostly_in": pair.mostly and {"term": pair.mostly[0], "bytes": pair.mostly[1]},
            }
            for pair in pairs
        ],
        "alive": _alive_report(budget),
        "budget": budget_report(budget),
    }


def _alive_report(budget: Budget) -> dict[str, Any] | None:
    """What is alive at the fullest moment of forward and backward, by module."""
    found = alive_by_module(budget, most=10_000)
    if found is None:
        return None
    rows = [{"term": row.term, "module": row.module, "bytes": row.num_bytes} for row in found.rows]
    return {"moment": found.moment.label, "modules": rows}
