"""What one run of an op costs: nanoseconds and workspace bytes, for the device it runs on."""

from rematc.costs.call import Call
from rematc.costs.price import price
from rematc.costs.rates import Rates, rates_of
from rematc.costs.roofline import kernel_ns
from rematc.costs.workspace import workspaces

__all__ = ["Call", "Rates", "kernel_ns", "price", "rates_of", "workspaces"]
