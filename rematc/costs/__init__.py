"""What one run of an op costs: nanoseconds and workspace bytes, for the device it runs on."""

from rematc.costs.price import price
from rematc.costs.rates import Rates, rates_of

__all__ = ["Rates", "price", "rates_of"]
