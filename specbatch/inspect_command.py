"""`specbatch inspect`: what a run did, read back from its output directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from specbatch.errors import ExitCode
from specbatch.job.report import report
from specbatch.streams import SafeStream


def inspect_output(output: str, *, decisions: bool, as_json: bool) -> int:
    """Print the report on stdout. Raises InputMissing, OutputMismatch."""
    found = report(Path(output))
    stdout = SafeStream(sys.stdout)
    if as_json:
        stdout.line(json.dumps(found.to_dict(decisions=decisions)))
        return ExitCode.OK
    from specbatch.console import make_console
    from specbatch.console_tables import print_decisions, print_report

    console = make_console(stdout)
    with console.capture() as captured:
        if decisions:
            print_decisions(console, found)
        else:
            print_report(console, found)
    for line in captured.get().splitlines():
        stdout.line(line.rstrip())
    return ExitCode.OK
