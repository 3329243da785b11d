"""What one run of an op costs: nanoseconds and workspace bytes, for the device it runs on."""

from rematc.costs.call import Call
from rematc.costs.price import Prices, find_taken, is_ready_made, time_ops
from rematc.costs.rates import Rates, rates_of, rates_of_card
from rematc.costs.roofline import is_free
from rematc.costs.same import computes_the_same
from rematc.costs.table import Table
from rematc.costs.workspace import Layouts, Taken

__all__ = [
    "Call",
    "Layouts",
    "Prices",
    "Rates",
    "Table",
    "Taken",
    "computes_the_same",
    "find_taken",
    "is_free",
    "is_ready_made",
    "rates_of",
    "rates_of_card",
    "time_ops",
]
