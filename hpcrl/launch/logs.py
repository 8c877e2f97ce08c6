"""Logs: a file per rank with everything, and on rank 0's terminal what hpcrl itself has to say."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from pathlib import Path


class TerminalFormatter(logging.Formatter):
    """`12:30:05 message`, with the level in front of the message only where it is not INFO."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"{self.formatTime(record, '%H:%M:%S')} {level}{super().format(record)}"


def start(run_dir: str | os.PathLike[str], rank: int) -> None:
    """Log to `<run_dir>/logs/rank_%05d.log`, Python's warnings too; rank 0 shows hpcrl's own lines on stdout."""
    folder = Path(run_dir) / "logs"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = logging.FileHandler(folder / f"rank_{rank:05d}.log", encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.root.addHandler(file)
    logging.root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    if rank == 0:
        terminal = logging.StreamHandler(sys.stdout)
        terminal.setFormatter(TerminalFormatter())
        logging.getLogger("hpcrl").addHandler(terminal)
    faulthandler.enable()  # a crash in a library shows its Python stack on stderr


def take_terminal_from_torch() -> None:
    """torch hangs handlers of its own on its loggers; N ranks' worth of its warnings belong into the files."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "torch":
            logger.handlers = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
            logger.propagate = True
