"""Reports: `diagnose(run)` reads a run, evaluates the rules and returns a `Report`."""

from sonde.report.diagnose_run import diagnose
from sonde.report.own_cost import Overhead
from sonde.report.report_types import Report, RunFacts, Unevaluated, Unobserved

__all__ = ["Overhead", "Report", "RunFacts", "Unevaluated", "Unobserved", "diagnose"]
