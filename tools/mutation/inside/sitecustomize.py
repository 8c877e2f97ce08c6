"""Every Python process of a suite under `coverage` imports this at its start, as its folder is on PYTHONPATH.

It starts coverage.py, and attributes what runs to the test that started the process: pytest names the test in
PYTEST_CURRENT_TEST, which processes inherit. What a process executed that a test kills is lost.
"""

import os
import sys

if packages := os.environ.get("MUTATION_COVERAGE"):
    sys.path.append(packages)  # last, and for this import only: the suite sees nothing else that is there
    import coverage

    sys.path.remove(packages)
    import logging

    measured = coverage.process_startup()
    shut_down = logging.shutdown

    def save() -> None:
        shut_down()
        if measured is not None:
            measured.save()

    # ranks end in C's exit or in MPI_Abort, which Python does not hear of; hpcrl.runtime.world calls this before both
    logging.shutdown = save

    def switch() -> None:
        if measured is not None:
            measured.switch_context(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0])

    switch()
    if len(sys.orig_argv) > 1 and os.path.basename(sys.orig_argv[1]) == "server.py":
        # tests/preloaded/server.py forks ranks for later tests too, and runs them with runpy
        import runpy

        def of_the_test(run):
            def switched(*arguments, **options):
                switch()
                return run(*arguments, **options)

            return switched

        runpy.run_module, runpy.run_path = of_the_test(runpy.run_module), of_the_test(runpy.run_path)
