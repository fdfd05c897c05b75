"""From a memory budget to a plan of what to save, recompute or offload.

The graphs, and the solvers that find schedules for them, are in `remat.solvers`.
"""
