"""Generation engines, a folder each, and which one a config asks for. An engine takes requests and gives completions,
whatever the job."""
