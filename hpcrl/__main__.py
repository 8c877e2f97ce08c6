"""`python -m hpcrl`: what every rank of a job runs."""

import os
import sys

READERS = ("report", "samples", "status", "trace")  # of runs, which may be those of others
FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if sys.argv[1:2] and sys.argv[1] in READERS and sys.path[0] != FOLDER:
    try:
        if sys.path[0] == os.getcwd():  # Python imports from there first, such as a yaml.py in the run of another user
            del sys.path[0]
    except OSError:  # the working directory was removed
        pass

from hpcrl.cli import main  # noqa: E402

if __name__ == "__main__":  # spawned children import this file again and must not start a second job
    main()
