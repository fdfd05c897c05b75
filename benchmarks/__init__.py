"""Benchmarks of speed and memory, as ratios to the alternatives measured in the same run.

`python -m benchmarks` (`make bench`) runs every module here that has a `main(results)`. It writes the
measurements, with the versions of packages and a description of the machine, to `results/NAME.json`.
"""
