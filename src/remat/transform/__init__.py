"""The transform: `checkpoint`, the primitive it binds, what keeps XLA from undoing it, policies.

In the order in which data flows:

    checkpoint        `remat.checkpoint`: from a function's arguments to one equation
    statics           which arguments are static, and functions with these filled in
    refs              programs that read and write refs, as programs on their values
    policies/         which values a user wants saved, recomputed or offloaded
    derivative_rules  those in a jaxpr, and batching rules, in which a policy may select names
    primitive         the primitive and its rules: differentiation, batching, lowering and so on
    marks             a policy's decisions about values, written into the jaxpr
    cut               a differentiated region in two halves: what is saved, and what is recomputed from it
    barrier           what keeps XLA from merging recomputations with the forward pass
    outlining         functions for operations that XLA for CPU expands into large arrays
    residuals         the saved values of a function, as data and as text
"""
