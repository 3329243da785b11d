"""Problem -> Plan, by OR-Tools."""

from rematc.solve.solver import refusal, solve

__all__ = ["refusal", "solve"]
