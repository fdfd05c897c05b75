"""Compiler options of tests that compare bits: what XLA fuses into a kernel rounds as users see it."""

# The other tests compile kernels without LLVM's optimizations (see `conftest.py`). Then XLA's approximations
# of functions such as tanh round in another way in one kernel than in another.
USUAL_KERNELS = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
