"""The cases, one module for each package. A module imports its packages: import it when it is needed."""
