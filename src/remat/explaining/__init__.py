"""How `remat.explain` finds out what a step does; `remat.report` is what it says.

In the order in which data flows:

    step        a function as a traced training step on a target
    sides       its program, with the forward, recomputed, backward and update part told apart
    account     the values that are written, their lifetimes and kinds, the timeline
    hlo         what the compiled program holds when most is live
    regions     what policies and regions did, as facts
    findings    what the reader should know, with the next step to take
"""
