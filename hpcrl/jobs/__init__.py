"""One file per subcommand that runs on all ranks: its config section, checks, roles and loop. What several jobs share
is in `hpcrl.run`."""
