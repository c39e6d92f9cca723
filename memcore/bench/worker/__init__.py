"""The part of measuring that runs in worker processes. All modules in this folder but this one import torch."""

import os

# Threads that wait for one another by spinning make a step many times slower where the machine has other work. The
# library of threads reads this when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Not a line on standard error for every profile.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")
