"""Proof on this machine: the real engine runs a small model, and its memory is laid beside the prediction.

A :class:`~memcore.verify.case.Case` is a scenario that is small enough to run here. Ranks run it (``worker/``), the
heavy lane looks after them, and :mod:`memcore.verify.proof` says how far the prediction was off.
"""
