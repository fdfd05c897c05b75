"""Planning of steps with functions that are marked by `remat.auto`: only these are recomputed.

In the order in which data flows:

    regions       `remat.auto`: a region, its name in plans, and the two ways of tracing a marked function:
                  to record its program, and to follow a plan
    trace         the traced step as a list of operations with sizes and times (`program.Program`)
    loop_options  the options of a loop: what its steps save, recompute or offload
    around_loops  the decisions about the program around the loops, from a schedule of its graph
    levels        a family of proposals from "save all" to "save least": at each, every loop takes its best
                  option at one price (the seconds that a byte is worth), and `around_loops` does the rest
    decisions     what is decided about a region
    emit          the region's program that follows from a decision
    after_edit    what remains of a region's decision when the plan's loops were edited
"""
