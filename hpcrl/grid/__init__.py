"""Where each role's ranks are: layout arithmetic, and the groups made from it."""
