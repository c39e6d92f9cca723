"""From what tensors take to what the allocator reserves: a model of PyTorch's caching allocator, and its input."""

from memcore.allocator.planning import reservation_plan
from memcore.allocator.steps import Plan, Reservation, dump_plan, load_reservation

__all__ = ["Plan", "Reservation", "dump_plan", "load_reservation", "reservation_plan"]
