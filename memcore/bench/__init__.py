"""Measuring on the machine at hand: real kernels, real autograd, real checkpointing, in worker processes.

A scenario gives a slice (its own layer, made small enough), a sweep is cases of it, the heavy lane has them
measured, the store keeps the figures, and findings says what they show. :mod:`memcore.bench.worker` runs in worker
processes only; the rest is plain data and arithmetic.
"""
