"""Speed and memory, as ratios against the alternatives measured in the same run.

`python -m benchmarks` (`make bench`) runs every module here that has a `main(results)` and writes
what it measured, with the versions and the machine, to `results/NAME.json`.
"""
