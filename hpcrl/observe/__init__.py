"""What a run leaves behind: records while it runs, readers of them, traces, and reports for people. Nothing here
changes what a run computes."""
