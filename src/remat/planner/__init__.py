"""From a memory budget to a plan of what to save, recompute or offload.

In the order in which data flows. From a step to proposals of what to recompute:

    step         the training step, traced in a tracing context and compiled for its memory
    tradeoffs    the options of a loop as pairs of bytes and seconds: which to offer, which to take
    host_memory  the values that a loop's steps keep in host memory, and the cost of the copies
    scan_pairs   what forward scans keep for backward scans, in a differentiated step
    bodies       bodies of other loops and of branches, scheduled like steps
    rewrite      the program that follows a schedule of the equations outside of loops
    decisions    decisions about loops (`scan_pairs`, `bodies`) and outside of them (`rewrite`), applied
    candidates   proposals: loops decided, then a schedule of the program outside of them
    search       which proposals are compiled, and what the compiler's answers change
    marked/      the same for steps with functions that are marked by `remat.auto`

The plan:

    plan            `remat.plan`: the search for a plan whose compiled peak is within the budget
    progress        the status line while planning
    plan_file       plans as data and as files
    plan_decisions  decisions about a whole step, to and from a plan
    processes       one plan for all processes of a run
    fit             `remat.fit`: a step that follows a plan
    fit_modules     the same for steps that take modules
    largest         `remat.largest`: the largest size of a step whose plan fits a budget

The graphs, and the solvers that find schedules for them, are in `remat.solvers`.
"""
