"""The transform: `checkpoint`, its primitive, policies, and the protection against XLA's CSE.

In the order in which data flows:

    checkpoint        `remat.checkpoint`: from a function's arguments to one equation
    statics           which arguments are static, and functions with these filled in
    refs              programs that read and write refs, as programs on their values
    policies/         which values a user wants saved, recomputed or offloaded
    derivative_rules  the derivative and batching rules in a jaxpr, whose names a policy may select
    primitive         the primitive and its rules: differentiation, batching, lowering and so on
    marks             a policy's decisions about values, written into the jaxpr
    cut               a differentiated region in two halves: what is saved, and what is recomputed from it
    barrier           protection of recomputations from being merged with the forward pass
    outlining         functions for operations that XLA for CPU expands into large arrays
    residuals         the saved values of a function, as data and as text
"""
