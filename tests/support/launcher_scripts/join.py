"""Joins the world, and says so.

``join.py stay`` stays in it until it is ended. With ``join.py fail-once FOLDER``, rank 1 fails the first
time, and the other ranks stay until their launcher starts them again; FOLDER is for their notes.
"""

import sys
import time
from pathlib import Path

import paceline

me = paceline.init()
print(f"rank {me.rank} of {me.world_size} joined\n", end="", flush=True)
if sys.argv[1:] == ["stay"]:
    time.sleep(100)
if sys.argv[1:2] == ["fail-once"]:
    note = Path(sys.argv[2]) / f"rank-{me.rank}"
    if not note.exists():
        note.touch()
        if me.rank == 1:
            sys.exit(1)
        time.sleep(100)
