"""What a trace found: bytes by category over the moments of a step, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Kinds of storage in a trace, states aside: those are the engine's to share out.
CATEGORIES = ("saved", "recomputed", "temporary", "loss")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationProfile:
    """Bytes alive beside weights, gradients and optimizer states, at the fullest instant of each moment.

    `forward[i]`, `backward[i]` and `loss` map each of `CATEGORIES` to bytes. A parameter's gradient counts as
    temporary until it is complete, then no more. `with_gradients` is the most bytes at any instant of the step
    with all gradients kept, in their parameters' dtype, as a plain training loop does. `kernels` says whose kernels'
    habits it speaks for, "cuda" or "cpu"; `attention` what was traced (a model may refuse the one asked
    for); `notes` what the user should know, in words. `traced_layers` of `num_layers` were run, the rest
    repeated. `versions` names the libraries that ran.
    """

    forward: tuple[Mapping[str, int], ...]
    backward: tuple[Mapping[str, int], ...]
    loss: Mapping[str, int]
    with_gradients: int
    kernels: str
    attention: str
    num_layers: int
    traced_layers: int
    versions: str
    notes: tuple[str, ...] = ()

    def peak(self) -> int:
        """The most bytes at any moment."""
        return max(sum(moment.values()) for moment in (*self.forward, *self.backward, self.loss))


def dump_profile(profile: ActivationProfile) -> dict[str, Any]:
    """The profile as JSON data; equal moments in a row are kept once."""
    return {
        "forward": _runs(profile.forward),
        "backward": _runs(profile.backward),
        "loss": dict(profile.loss),
        "with_gradients": profile.with_gradients,
        "kernels": profile.kernels,
        "attention": profile.attention,
        "num_layers": profile.num_layers,
        "traced_layers": profile.traced_layers,
        "versions": profile.versions,
        "notes": list(profile.notes),
    }


def load_profile(data: Mapping[str, Any]) -> ActivationProfile:
    """The inverse of :func:`dump_profile`."""
    return ActivationProfile(
        forward=_spread(data["forward"]),
        backward=_spread(data["backward"]),
        loss=data["loss"],
        with_gradients=data["with_gradients"],
        kernels=data["kernels"],
        attention=data["attention"],
        num_layers=data["num_layers"],
        traced_layers=data["traced_layers"],
        versions=data["versions"],
        notes=tuple(data["notes"]),
    )


def _runs(moments: tuple[Mapping[str, int], ...]) -> list[Any]:
    runs: list[list[Any]] = []
    for moment in moments:
        if runs and runs[-1][1] == dict(moment):
            runs[-1][0] += 1
        else:
            runs.append([1, dict(moment)])
    return runs


def _spread(runs: list[Any]) -> tuple[Mapping[str, int], ...]:
    return tuple(moment for count, moment in runs for _ in range(count))
