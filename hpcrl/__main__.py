"""`python -m hpcrl`: what every rank of a job runs."""

import os
import sys

READERS = ("report", "samples", "status", "trace")  # of runs, which may be those of others
FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if sys.argv[1:2] and sys.argv[1] in READERS and sys.path[:1] == [os.getcwd()] != [FOLDER]:
    del sys.path[0]  # Python imports from the working directory first, as a yaml.py in the run of another user

from hpcrl.cli import main  # noqa: E402

if __name__ == "__main__":  # spawned children import this file again and must not start a second job
    main()
