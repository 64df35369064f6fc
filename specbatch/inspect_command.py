"""`specbatch inspect`: what a run did, read back from its output directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from specbatch.errors import ExitCode
from specbatch.job.report import report
from specbatch.streams import SafeStream


def inspect_output(output: str, *, decisions: bool, as_json: bool) -> int:
    """Print the report on stdout. Raises InputMissing, OutputMismatch, ResourceError."""
    found = report(Path(output))
    stdout = SafeStream(sys.stdout)
    if as_json:
        stdout.line(json.dumps(found.to_dict(decisions=decisions)))
    else:
        from specbatch.console import print_page
        from specbatch.console_tables import print_decisions, print_report

        print_page(stdout, lambda console: (print_decisions if decisions else print_report)(console, found))
    stdout.require_delivered()
    return ExitCode.OK
