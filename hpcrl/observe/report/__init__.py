"""Runs for people: the HTML page of `hpcrl report`, `hpcrl samples` in a terminal, tables and pictures. Folders of runs
are read by `hpcrl.observe.read`."""
