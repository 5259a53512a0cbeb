"""What keeps a run from learning or harms it: rules from metrics, settings and files to causes.

One implementation serves the warnings of a run in progress, summary.json, `assay doctor`, and pages about runs.
"""

from assay.checks.causes import CAUSES, Diagnosis, Severity, as_facts, remember
from assay.checks.diagnosis import diagnose, diagnose_run

__all__ = ["CAUSES", "Diagnosis", "Severity", "as_facts", "diagnose", "diagnose_run", "remember"]
