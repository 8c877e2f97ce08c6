"""One file per subcommand that runs on all ranks: its config section, checks, roles and loop."""
