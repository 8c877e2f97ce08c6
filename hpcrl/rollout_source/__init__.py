"""Where a step's samples come from: synchronous, one step off, or streaming."""
