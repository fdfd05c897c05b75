"""Programs as data: jaxprs and what their equations mean, without JAX's internals.

operations   a table of JAX's primitives: fusion, cost, and whether they may be recomputed
formulas     FLOP counts of primitives whose work is not proportional to their result
jaxprs       jaxprs inside equations: bodies, inlining, substitution, dependence
equations    properties of single equations, from the table
flops        FLOPs and bytes of equations and programs
repetitions  common subexpressions: equations of one program that repeat those of another
carries      loops without carried arrays that never change or that equal others
swapped      products of matrices that are transposed, with swapped operands instead
numbers      numbers of which a compiler need not know the values to round the same
updates      updates of donated arguments, moved to the place where their gradients are ready
fingerprint  fingerprints of jaxprs, independent of names
rewriting    changing the equations of a program at any depth
restriction  programs in which only equations of marked functions may be recomputed (`remat.auto`)
split/       a program split into a forward and a backward half, with its loops and branches
"""
