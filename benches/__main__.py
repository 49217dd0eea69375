"""`python -m benches [module ...]`: every bench as one table, and as rows in benches/results.jsonl."""

import json
import sys
from importlib import import_module
from pathlib import Path

MODULES = ("pools", "requests", "steps", "tables", "depth_planner")
# What the project aims at (research note on engines, 7.5, and the issue that asked for the benches), median microseconds.
AIMS = {
    ("pool.alloc_free", "n=128"): 0.1,
    ("slot.alloc_free", "n=1"): 1.0,
    ("tree.match", "tokens=2048 chains=64 page=16"): 10.0,
    ("tree.match", "tokens=2048 chains=64 page=512"): 10.0,
    ("planner.still_step", "fa block=16 seqs=256"): 150.0,
    ("planner.still_step", "fa+1 block=16 seqs=256"): 150.0,
    ("planner.still_step", "fa+3 block=16 seqs=256"): 150.0,
}


def main(names):
    out = Path(__file__).parent / "results.jsonl"
    print(f"{'id':26}{'shape':38}{'unit':>9}{'best us':>11}{'median us':>11}{'aim':>9}")
    with out.open("w", encoding="utf-8") as lines:
        for name in names or MODULES:
            for row in import_module(f"benches.{name}").rows():
                lines.write(json.dumps(row) + "\n")
                aim = AIMS.get((row["id"], row["shape"]))
                cells = f"{row['us']:>11.3f}{row['us_median']:>11.3f}{'' if aim is None else f'{aim:g}':>9}"
                print(f"{row['id']:26}{row['shape']:38}{row['unit']:>9}{cells}", flush=True)
    print(f"rows: {out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out}")


if __name__ == "__main__":
    main(sys.argv[1:])
