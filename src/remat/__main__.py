"""`python -m remat` is the command `remat`."""

from remat.cli import main
from remat.cli.errors import run

if __name__ == "__main__":
    run(main)
