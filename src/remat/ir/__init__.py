"""Programs as data: jaxprs and what their equations mean, without JAX's internals."""
