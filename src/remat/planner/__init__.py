"""From a memory budget to a plan of what to save, recompute or offload.

In the order in which data flows:

    regions      `remat.auto`: a region, its name in plans, and the tracing contexts that record and plan it
    step         the training step, traced in such a context and compiled for its memory
    trace        the traced step as a `program.Program`
    bodies       the options of a loop: what its steps save, recompute or offload
    decide       the decisions about the rest of the program, from a schedule of its graph
    levels       both together, at a price per byte
    scan_pairs   what forward scans keep for backward scans, in a differentiated step
    inside       bodies of other loops and of branches, scheduled like steps
    candidates   for steps without marked functions: loops decided, then a schedule of the whole step
    rewrite      the program that follows such a schedule
    whole_step   both together: decisions about a step, and the program that follows them
    search       which candidates are compiled, and what the compiler's answers change
    step_decisions   decisions about a whole step, to and from a plan
    plan         `remat.plan`: the search for a plan whose compiled peak is within the budget
    plan_file    plans as data and as files
    fit          `remat.fit`: a step that follows a plan
    decisions    what is decided about a region
    emit         the region's program that follows from a decision
    edits        a region's decision after an edit of the plan's loops

The graphs, and the solvers that find schedules for them, are in `remat.solvers`.
"""
