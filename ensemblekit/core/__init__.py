"""The small core: hooks, what a plugin is, the registry, losses, the objective, decomposition, metrics, errors, seeds.

Pure functions and plain values: nothing here trains. Uses no other layer. Start with
`hookspecs.py` (every extension point on one page), then `objective.py` (how the hooks make one number).
"""
