"""The command `remat`: explain, plan, report, compare, demo, devices.

In the order in which a command line is processed:

    main        the commands: their arguments, help texts and actions
    options     the types of arguments and the options that several commands share
    subject     MODULE:FUNCTION as a loss or step with its arguments
    planning    a subject's plan and its explanation
    rendering   writing to the terminal and to files
    errors      every error as one line, in the words of the command line

MODULE:FUNCTION or FILE.py:FUNCTION names a function without required arguments that returns
``(step, args)`` or ``(step, args, kwargs)``. `step` is a loss, which is differentiated with respect to its
first argument, or a whole training step; the arguments are arrays or `jax.ShapeDtypeStruct`s. Only that
function is executed; the step is traced and compiled.

Exit codes: 0 success; 1 the budget is not met, the step or the library raised an error, or the command
was interrupted; 2 the command line is invalid.
"""

from remat.cli.main import main as main
