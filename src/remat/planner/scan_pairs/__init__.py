"""Rematerialization in the loops of a differentiated step: a pass from jaxpr to jaxpr.

`pairs` finds each forward scan whose stacked results a backward scan reads, and each forward conditional
whose residuals a backward one reads, with their options: which values to keep and which to recompute.
`rewrite` writes chosen options into the program. `opened` returns the program with the user's own checkpoints
in such loops inlined, so that the options decide what these recompute, too. In the program that `sunk`
returns, loops convert the slices of weights that they read.

    matching     which equations form pairs
    inside       the programs inside equations
    joint        the two bodies as one program
    shards       pairs of `shard_map`s with such scans inside
    branches     pairs of conditionals, joined branch by branch
    emission     writing the two scans of a pair that keeps some values
    groups       writing them in groups of steps
    rewriting    the program with options chosen
    scope        programs with the bytes of their values and the seconds of their equations
    pair_options the options of one pair: minimum cuts, groups of steps
    options      the pairs in a program, with their options
    opening      inlining of checkpoints in the bodies
    sinking      converting weights slice by slice, in the loops that read them

Known limits: a scan belongs to one pair; a `while` loop to none.
"""

from remat.planner.plan_decisions import ScanOption as ScanOption
from remat.planner.scan_pairs.opening import opened as opened
from remat.planner.scan_pairs.options import pairs as pairs
from remat.planner.scan_pairs.pair_options import ScanPair as ScanPair
from remat.planner.scan_pairs.rewriting import rewrite as rewrite, step_id as step_id
from remat.planner.scan_pairs.sinking import sunk as sunk
from remat.planner.tradeoffs import at_price as at_price, prices as prices
