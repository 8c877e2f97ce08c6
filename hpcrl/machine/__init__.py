"""The machine that jobs run on: `hpcrl check`, measurements of its ranks and links, and machine files with measured
rates. Nothing that a job needs while it runs (`hpcrl.runtime`)."""
