"""Problem -> Plan, by OR-Tools."""

from rematc.solve.solver import solve

__all__ = ["solve"]
