"""The answer as data for other programs: JSON and table rows, in whole bytes and unrounded numbers.

Keys carry their units. They and their values are identifiers, which are not translated; only warnings and notes are
sentences, in the current language.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from memcore.alive import alive_by_module
from memcore.budget import Budget
from memcore.compare import beside_closed_form, closed_form
from memcore.ds_config import Reading
from memcore.ladder import Ladder
from memcore.model_report import by_shapes
from memcore.models import catalogue_model
from memcore.notices import notices
from memcore.scenario import exported_data
from memcore.terms import Phase, Term
from memcore.trace.profile import dump_profile
from memcore.units import ByteUnit
from memcore.zero import Communication


def budget_report(budget: Budget) -> dict[str, Any]:
    """The budget as JSON data, in bytes per GPU (the fullest rank).

    The terms' `bytes` add up to `peak_bytes`, and their `by_phase` to the budget's own `by_phase`. A term's
    formula explains `largest_bytes`, the most that it takes at any moment.
    """
    return {
        "scenario": exported_data(budget.scenario),
        "peak_bytes": budget.peak_bytes,
        "binding_phase": budget.binding_phase.value,
        "binding_moment": budget.timeline[budget.peak_index].label,
        "verdict": budget.verdict.value,
        "error_band_percent": budget.band.percent,
        "error_band": "published_runs" if budget.band.earned else "assumed",
        "error_band_runs": budget.band.runs,
        "not_counted": [part.value for part in budget.missing],
        "warnings": [
            {"kind": notice.kind.value, "stops": notice.stops, "text": notice.text}
            for notice in notices(budget, ByteUnit.GB)
        ],
        "static": {**asdict(budget.static), "total_bytes": budget.static.total_bytes},
        "ladder": _ladder(budget.ladder, budget),
        "by_phase": {phase.value: budget.totals[index] for phase, index in budget.phase_peaks().items()},
        "terms": [_term(term, budget) for term in budget.terms],
        "start": _start(budget.start),
        "activations_from": budget.activations_from.value,
        "precision": {"label": budget.states.precision.label, "source": budget.states.precision.citation},
        "parameters": {
            "total": budget.states.n_params,
            "active": _active(budget),
            "trained": budget.states.trained,
            **by_shapes(budget.inventory),
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


def _ladder(ladder: Ladder, budget: Budget) -> dict[str, Any]:
    return {
        "allocated_bytes": ladder.allocated,
        "needed_bytes": ladder.needed,
        "headroom_bytes": ladder.headroom,
        "reserved_bytes": ladder.reserved,
        "reserved_evidence": ladder.reserved_evidence.value,
        "reserved_source": ladder.reserved_source,
        "runtime_bytes": ladder.runtime.largest,
        "runtime_evidence": ladder.runtime.evidence.value,
        "runtime_source": ladder.runtime.source,
        "device_bytes": ladder.device,
        "cached_bytes": ladder.cached if ladder.steady else None,
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


def _start(start: Term | None) -> dict[str, Any] | None:
    """What the engine's start takes where the whole model is made on the GPU first; None where it is not predicted."""
    if start is None:
        return None
    return {"bytes": start.largest, "formula": asdict(start.formula), "source": start.source}


def _active(budget: Budget) -> int | None:
    """Parameters that one token uses; None where only a count is known."""
    if budget.inventory is not None:
        return budget.inventory.n_active
    name = budget.scenario.model.name
    return None if name is None else catalogue_model(name).n_active_params


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
