"""How much GPU memory a training run takes, where every byte goes, and how far to trust the answer.

Start at :func:`memcore.budget.predict`: a :class:`memcore.scenario.Scenario` goes in, a
:class:`memcore.budget.Budget` comes out. Nothing here imports torch or transformers; what needs them
runs in worker processes (:mod:`memcore.jobs`).
"""

__version__ = "0.1.0"
