"""Exact activation memory from the real model on fake tensors, without a GPU.

:mod:`memcore.trace.profile` and :mod:`memcore.trace.replay` are plain data and arithmetic. The rest imports torch
and transformers and runs in worker processes only (task "trace").
"""
