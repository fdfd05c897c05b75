"""From a memory budget to a plan of what to save, recompute or offload.

Read `planning` first: it calls `search`, which asks `step_model` for proposals. In the order in which data
flows, from a step to proposals of what to recompute:

    step         the training step: traced, and compiled to learn its memory
    tradeoffs    choosing among the options of loops by their costs in bytes and seconds
    host_memory  which values the steps of a loop keep in host memory, and the cost of the copies
    copy_windows which values of unrolled code are kept in host memory, and when their copies run
    host_copies  these copies, written into the program
    host_state   steps whose optimizer state stays in host memory
    host_updates the loops that update this state in host memory, chunk by chunk
    scan_pairs   what forward scans keep for backward scans, in a differentiated step
    bodies       loops and branches that hold a whole gradient: their bodies are scheduled like a step
    unit_starts  where the units of a program begin, so that compilers keep its order
    rewrite      recomputation outside of loops, written into the program
    traced_loops loops written by tracing a function that runs scans
    stacks       loops that start from arrays of their own, which compilers do not merge
    decisions    all decisions about a step (`scan_pairs`, `bodies`, `rewrite`), written in their order
    priced_step  the step with the costs of its kernels, under several models of fusion
    loop_choices the loops of a step: a sequence of decisions, from most to least memory
    loop_level   one of these decisions, and a schedule of the program outside of the loops
    step_model   proposals: which combinations of the two to try within a budget
    search       which proposals to compile, and corrections by the compiler's answers
    auto         `remat.auto`: recompute only inside of marked functions (`ir.restriction`)

The plan:

    plan             `remat.plan`: its options, checked
    planning         the search for a plan whose compiled peak is within the budget
    programs         the programs that it compiles
    refusal          the error for a budget that no plan fits
    progress         the status line while planning
    checked          dataclasses that check the types of their fields
    plan_decisions   the decisions of a plan as data
    plan_file        plans as data and as files
    whole_step_file  decisions about a step to and from a plan file
    processes        one plan for all processes of a run
    fit              `remat.fit`: a step that follows a plan
    fit_modules      the same for steps that take modules
    largest          `remat.largest`: the largest size of a step whose plan fits a budget

The graphs, and the solvers that find schedules for them, are in `remat.solvers`.
"""
