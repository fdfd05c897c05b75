"""`python -m remat` is the command `remat`."""

from remat_command import main

if __name__ == "__main__":
    main()
