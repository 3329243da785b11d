"""A plan for people: what is saved, what is recomputed, and why."""

from rematc.files import write_whole
from rematc.report.table import report

__all__ = ["report", "write_whole"]
