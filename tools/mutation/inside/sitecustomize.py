"""Every Python process of a suite under `coverage` imports this at its start, as its folder is on PYTHONPATH.

It starts coverage.py, and attributes what runs to the test that started the process: pytest names the test in
PYTEST_CURRENT_TEST, which processes inherit.
"""

import os
import sys

if packages := os.environ.get("MUTATION_COVERAGE"):
    sys.path.append(packages)  # last, and for this import only: nothing else there is seen by the suite
    import coverage

    sys.path.remove(packages)
    measured = coverage.process_startup()

    def switch() -> None:
        if measured is not None:
            measured.switch_context(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0])

    switch()
    if sys.argv and os.path.basename(sys.orig_argv[1] if len(sys.orig_argv) > 1 else "") == "server.py":
        # a server of preloaded ranks: it forks them for later tests too, and runs them with runpy
        import runpy

        def of_the_test(run):
            def switched(*arguments, **options):
                switch()
                return run(*arguments, **options)

            return switched

        runpy.run_module, runpy.run_path = of_the_test(runpy.run_module), of_the_test(runpy.run_path)
