"""Planning of steps with functions that are marked by `remat.auto`: only these are recomputed.

In the order in which data flows:

    regions       `remat.auto`: a region, its name in plans, and the tracing contexts that record and plan it
    trace         the traced step as a `program.Program`
    loop_options  the options of a loop: what its steps save, recompute or offload
    decide        the decisions about the program around the loops, from a schedule of its graph
    levels        loops (`loop_options`) and the program around them (`decide`) at one price per byte
    decisions     what is decided about a region
    emit          the region's program that follows from a decision
    edits         a region's decision after an edit of the plan's loops
"""
