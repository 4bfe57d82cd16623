"""Runs the cases of a program, and writes their outcomes in the form of `report.py`."""

import json
import os
import traceback


def write_outcomes(run):
    """`run` gets the name of a case, and raises an exception if the case fails."""
    with open(os.environ["CLIENTS_REPORT"], "a") as report:
        for case in open(os.environ["CLIENTS_CASES"]).read().split():
            error = None
            try:
                run(case)
            except Exception:
                error = traceback.format_exc()
            report.write(json.dumps({"case": case, "error": error}) + "\n")
            report.flush()
