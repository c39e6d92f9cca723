"""The part of measuring that runs in worker processes. All modules in this folder but this one import torch."""
