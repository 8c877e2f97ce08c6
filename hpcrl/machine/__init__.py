"""The machine that jobs run on: `hpcrl check`, measurements of its ranks and links, and machine files. Nothing that a
job needs while it runs (`hpcrl.runtime`)."""
