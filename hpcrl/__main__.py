"""`python -m hpcrl`: what every rank of a job runs."""

from hpcrl.cli import main

if __name__ == "__main__":  # spawned children import this file again and must not start a second job
    main()
