"""Runs the thirty shape checks and writes docs/reproduction.md. `make reproduce`, or numbers for some of them."""

import sys
import time
from pathlib import Path

from benches.depth_checks import CHECKS, Check, Seen
from benches.depth_lab import Lab

TARGET = Path(__file__).parent.parent / "docs" / "reproduction.md"
HEAD = """# Shape checks of continuous depth batching

Thirty claims about the schedules of looped models: from the CDB paper (arXiv 2608.09444), from algebra, or predicted by
the latency model. Every figure below comes from the simulator, which runs the real planner and times its launches with
`hybridkv.schedule.latency`; nothing was measured on a device. Workloads are drawn from seed 0. A check holds if every
value lies in its band; a check that does not is listed as missed, and its band stays.

`make reproduce` writes this page; `python -m benches.reproduce 14 15` shows some checks only.

"""


REMARKS = {
    12: "Offline, a refill prefill falls between a prelude and the next loop, so its first tokens take a prelude of their "
    "own: one more a prefill. Huginn's preludes are dear, and Alpaca, with its short outputs, prefills often.",
    29: "At full depth refill buys nothing, and prompts that arrive while others are between two loops stay out of step "
    "with them: about three times as many preludes and codas as under CB, each a third as large. The paper's "
    "conservative thresholds still leave some early exits.",
}
"""Why a check is missed, where it is."""


def main(arguments: list[str]) -> int:
    chosen = {int(argument) for argument in arguments} or {check.number for check in CHECKS}
    lab, results = Lab(), []
    for check in sorted(CHECKS, key=lambda check: check.number):
        if check.number in chosen:
            start = time.perf_counter()
            seen = list(check.measure(lab))
            results.append((check, seen))
            state = "holds" if all(s.holds for s in seen) else "MISSED"
            print(
                f"{check.number:2} {state:6} {time.perf_counter() - start:5.1f} s  {check.claim}",
                file=sys.stderr,
            )
            for s in seen:
                if not s.holds or arguments:
                    print(f"      {shown(s)}", file=sys.stderr)
    if not arguments:
        TARGET.parent.mkdir(exist_ok=True)
        TARGET.write_text(HEAD + page(results), encoding="utf-8")
        print(TARGET, file=sys.stderr)
    return 0


def page(results: list[tuple[Check, list[Seen]]]) -> str:
    missed = [check.number for check, seen in results if not all(s.holds for s in seen)]
    summary = f"{len(results) - len(missed)} of {len(results)} hold."
    if missed:
        summary += f" Missed: {', '.join(map(str, missed))}."
    lines = [summary, "", "| # | claim | seen (band) | |", "|---|---|---|---|"]
    for check, seen in results:
        verdict = "missed" if check.number in missed else "holds"
        lines.append(f"| {check.number} | {check.claim} | {'<br>'.join(map(shown, seen))} | {verdict} |")
    remarks = [f"* {number}: {REMARKS[number]}" for number in missed if number in REMARKS]
    return "\n".join([*lines, *(["", "Why they are missed:", "", *remarks] if remarks else [])]) + "\n"


def shown(seen: Seen) -> str:
    mark = "" if seen.holds else " **missed**"
    return f"{seen.what}: {number(seen.value)} ({band(seen)}){mark}"


def band(seen: Seen) -> str:
    if seen.high == float("inf"):
        return f"at least {number(seen.low)}"
    return number(seen.low) if seen.low == seen.high else f"{number(seen.low)} to {number(seen.high)}"


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
